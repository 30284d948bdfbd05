"""What ring, all-to-all and tensor parallelism cost past one machine: predictions of mha_ext.distributed.costs.

    python benchmarks/scaling.py --heads 32 --kv-heads 8 --bandwidth 50e9 --flops 400e12

Nothing is measured here: bandwidth (bytes a second that one rank sends) and FLOP/s are inputs. One causal attention,
forward and backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mha_ext.distributed import costs

RANKS = (8, 32, 128, 512, 1024)
TOKENS = (8_192, 131_072, 1_048_576, 10_485_760)


def seconds(cost: Callable[..., float], *arguments: float | costs.Shape) -> float:
    """Forward and backward."""
    return sum(cost(*arguments, causal=True, backward=backward) for backward in (False, True))


def row(shape: costs.Shape, ranks: int, bandwidth: float, speed: float) -> list[str]:
    """Milliseconds and gigabytes of each way, "-" where the ranks do not divide the heads; and the fastest."""
    divided = shape.heads % ranks == 0 and shape.kv_heads % ranks == 0
    given = (shape, ranks, bandwidth, speed)
    times = {"ring": seconds(costs.ring_seconds, *given)}
    sizes = {"ring": costs.ring_memory(shape, ranks, backward=True)}
    if divided:
        times["all-to-all"] = seconds(costs.all_to_all_seconds, *given)
        times["tensor"] = seconds(costs.tensor_parallel_seconds, *given)
        sizes["all-to-all"] = costs.all_to_all_memory(shape, ranks, backward=False)
        sizes["tensor"] = costs.tensor_parallel_memory(shape, ranks)
    names = ("ring", "all-to-all", "tensor")
    return [
        *(f"{1e3 * times[name]:.3g}" if name in times else "-" for name in names),
        *(f"{sizes[name] / 1e9:.2g}" if name in sizes else "-" for name in names),
        min(times, key=times.__getitem__),
    ]


def hidden_from(shape: costs.Shape, ranks: int, bandwidth: float, speed: float) -> float:
    """Tokens from which the ring computes longer than it sends: G / H · bytes · (R - 1) · FLOP/s / bandwidth."""
    return shape.kv_heads / shape.heads * shape.item * (ranks - 1) * speed / bandwidth


def fewer_bytes_from(shape: costs.Shape) -> float:
    """Ranks beyond which all-to-all sends less than the ring, forward, where D = V and Lq = Lk: 1 + H / G."""
    return 1 + shape.heads / shape.kv_heads


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--item", type=int, default=2, help="bytes of an element")
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes/s a rank sends")
    parser.add_argument("--flops", type=float, default=400e12, help="FLOP/s of a rank")
    a = parser.parse_args(arguments)

    def shape(tokens: int) -> costs.Shape:
        sizes = (a.batch, a.heads, a.kv_heads, tokens, tokens, a.head_dim, a.head_dim, a.item)
        return costs.Shape(*sizes)

    print(
        f"{a.heads} heads, {a.kv_heads} key heads, head_dim {a.head_dim}, {a.item} bytes, batch {a.batch}"
    )
    print(f"assumed: {a.bandwidth:.3g} bytes/s, {a.flops:.3g} FLOP/s for each rank")
    print(f"{'':15}  {'milliseconds':>24}  {'GB on a rank':>24}")
    line = "{:>9} {:>5}  {:>6} {:>10} {:>6}  {:>6} {:>10} {:>6}  {}"
    names = ("ring", "all-to-all", "tensor")
    print(line.format("tokens", "ranks", *names, *names, "fastest"))
    for tokens in TOKENS:
        for ranks in RANKS:
            cells = row(shape(tokens), ranks, a.bandwidth, a.flops)
            print(line.format(tokens, ranks, *cells))
    whole = shape(TOKENS[0])
    print(
        f"all-to-all sends less than the ring, forward, beyond {fewer_bytes_from(whole):.3g} ranks"
    )
    hidden = (f"{hidden_from(whole, r, a.bandwidth, a.flops):.2g} ({r})" for r in RANKS)
    print(
        "the ring hides what it sends, forward, from this many tokens (ranks): " + ", ".join(hidden)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
