"""Five multi-head attentions that people write by hand, each built from mha_ext.

    python examples/seeds.py

prints what each of them prints: shapes, probabilities, the picture of the data flow. The builders
take the names that those systems use; tests/test_seeds.py gives each one's weights to its builder
and finds its numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mha_ext


def cross_attention(hid_dim: int, n_heads: int, dropout: float) -> mha_ext.MultiHeadAttention:
    """Queries and keys of different lengths; mask == 0 is filled with -1e10, so that a fully masked
    row attends to everything alike."""
    return mha_ext.MultiHeadAttention(hid_dim, n_heads, dropout=dropout, empty_rows="uniform")


def self_attention(hidden_dim: int, nums_head: int) -> mha_ext.MultiHeadAttention:
    """Self-attention that shows its weights; mask == 0 is filled with -1e20."""
    return mha_ext.MultiHeadAttention(hidden_dim, nums_head, dropout=0.1, empty_rows="uniform")


def three_widths(
    query_size: int, key_size: int, value_size: int, hidden_size: int, num_heads: int
) -> mha_ext.MultiHeadAttention:
    """Query, key and value of three widths, every head hidden_size wide; no mask."""
    return mha_ext.MultiHeadAttention(
        hidden_size * num_heads,
        num_heads,
        query_dim=query_size,
        key_dim=key_size,
        value_dim=value_size,
    )


def bert_layer(
    num_attention_heads: int,
    input_size: int,
    hidden_size: int,
    hidden_dropout_prob: float,
    attention_probs_dropout_prob: float,
) -> mha_ext.AttentionBlock:
    """LayerNorm(x + Dropout(Attention(x))) with an additive mask [B, 1, 1, L]: its bias."""
    return mha_ext.AttentionBlock(
        hidden_size,
        num_attention_heads,
        query_dim=input_size,
        dropout=attention_probs_dropout_prob,
        hidden_dropout=hidden_dropout_prob,
    )


def visible_attention(d_model: int, num_heads: int) -> mha_ext.MultiHeadAttention:
    """No biases; padding and look-ahead masks; the probabilities are returned to be looked at."""
    return mha_ext.MultiHeadAttention(d_model, num_heads, bias=False, empty_rows="uniform")


def show_cross_attention() -> None:
    query, key, value = torch.rand(64, 12, 300), torch.rand(64, 10, 300), torch.rand(64, 10, 300)
    attention = cross_attention(hid_dim=300, n_heads=6, dropout=0.1)
    print(attention(query, key, value).shape)


def show_self_attention() -> None:
    padding = torch.tensor([[0, 1], [0, 0], [1, 0]])
    mask = padding[:, None, None, :].expand(3, 8, 2, 2)  # read in place, never written out
    x = torch.rand(3, 2, 128)
    out, weights = self_attention(128, 8)(x, mask=mask, need_weights=True)
    print(weights)
    print(out.shape)


def show_three_widths() -> None:
    attention = three_widths(query_size=20, key_size=30, value_size=40, hidden_size=16, num_heads=4)
    print(attention)
    out = attention(torch.rand(2, 5, 20), torch.rand(2, 7, 30), torch.rand(2, 7, 40))
    print(out.shape)


def show_bert_layer() -> None:
    lengths = torch.tensor([6, 4])
    mask = (torch.arange(6) >= lengths[:, None]).float()[:, None, None, :] * -10000.0
    layer = bert_layer(12, 768, 768, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    print(layer(torch.rand(2, 6, 768), bias=mask).shape)
    try:
        bert_layer(7, 768, 768, 0.1, 0.1)
    except ValueError as error:
        print(f"ValueError: {error}")


def show_visible_attention() -> None:
    query, key = torch.rand(2, 4, 512), torch.rand(2, 6, 512)
    attention = visible_attention(d_model=512, num_heads=8)
    padding = (torch.arange(6) < torch.tensor([6, 4])[:, None])[:, None, None, :]
    out, weights = attention(query, key, mask=padding, need_weights=True)
    print(f"weights {list(weights.shape)}; head 0 of the padded sequence, query by query:")
    print(shades(weights[1, 0]))
    print(data_flow(attention, query, key, key))
    look_ahead = torch.ones(4, 4).tril().bool()[None, None]
    _, weights = attention(query, mask=look_ahead, need_weights=True)
    print(f"look-ahead: weights {list(weights.shape)}, head 0:")
    print(shades(weights[0, 0]))


def shades(weights: Tensor) -> str:
    """Probabilities [Lq, Lk] as text: a row for each query, darker = more."""
    marks = " .:-=+*#%@"
    rows = (weights * (len(marks) - 1)).ceil().int().tolist()
    return "\n".join("  |" + "".join(2 * marks[level] for level in row) + "|" for row in rows)


def data_flow(layer: mha_ext.MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> str:
    """The way of the data through a layer, with the shapes that it really has."""
    shapes: dict[str, tuple[str, str]] = {}

    def note(name: str, tensors: tuple[Tensor, ...], result: Tensor) -> None:
        shapes[name] = (str(list(tensors[0].shape)), str(list(result.shape)))

    hooks = [
        child.register_forward_hook(lambda _, x, y, name=name: note(name, x, y))
        for name, child in layer.named_children()
        if isinstance(child, nn.Linear)
    ]
    layer(query, key, value)
    for hook in hooks:
        hook.remove()
    batch, queries, keys, heads = query.shape[0], query.shape[1], key.shape[1], layer.num_heads
    heads_of = {
        "q_proj": [batch, heads, queries, layer.head_dim],
        "k_proj": [batch, layer.num_kv_heads, keys, layer.head_dim],
        "v_proj": [batch, layer.num_kv_heads, keys, layer.value_head_dim],
    }
    lines = [
        [name, *(shapes[f"{name[0]}_proj"][0], f"{name[0]}_proj", shapes[f"{name[0]}_proj"][1])]
        + ["split", str(heads_of[f"{name[0]}_proj"])]
        for name in ("query", "key", "value")
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    picture = [
        "  {} {} -> {} {} -> {} {} --+".format(
            *(text.ljust(width) for text, width in zip(line, widths, strict=True))
        )
        for line in lines
    ]
    merged, out = shapes["out_proj"]
    attended = str([batch, heads, queries, layer.value_head_dim])
    column = len(picture[0]) - 1
    picture += [
        " " * column + "|",
        f"  softmax(Q K^T / sqrt({layer.head_dim})) V {attended} <".ljust(column, "-") + "+",
        f"  -> merge {merged} -> out_proj {out}",
    ]
    return "\n".join(picture)


def main() -> None:
    torch.manual_seed(0)
    for show in (
        show_cross_attention,
        show_self_attention,
        show_three_widths,
        show_bert_layer,
        show_visible_attention,
    ):
        print(f"--- {show.__name__.removeprefix('show_').replace('_', ' ')}")
        show()


if __name__ == "__main__":
    main()
