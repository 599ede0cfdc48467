"""The head applied apart from the body gives the model's own log-probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
)
from transformers.models import auto

from cluster_sft import heads

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def random_model(config, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # spread the logits, so that a scale or softcap shows
            model.get_output_embeddings().weight.mul_(30)
    return model.to(dtype).eval()


def random_batch(rows=3, width=12):
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, 50, (rows, width), generator=generator)
    mask = torch.ones_like(input_ids)
    mask[1, width - 4 :] = 0
    positions = torch.tensor([2, 3, 4, width + 1, width + 5, 2 * width + 9])
    return input_ids, mask, positions, input_ids.flatten()[positions + 1]


CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "cohere2-logit_scale": Cohere2Config(**SIZES, logit_scale=0.25),
    "granite-logits_scaling": GraniteConfig(**SIZES, logits_scaling=3.0),
    "gemma2-softcap": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=5.0),
    "falcon_h1-multiplier": FalconH1Config(
        **SIZES, lm_head_multiplier=0.3, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8
    ),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "bloom-no-position-ids": BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_token_log_probs_equal_the_models_own_forward(name):
    model = random_model(CONFIGS[name], torch.float32 if "falcon" in name else torch.float64)
    input_ids, mask, positions, targets = random_batch()
    with torch.no_grad():
        own = model(input_ids, attention_mask=mask).logits.double().log_softmax(-1)
        hidden = heads.head_inputs(model, input_ids, mask).flatten(0, 1)[positions]
        got = heads.token_log_probs(model, hidden, targets)
    expected = own.flatten(0, 1)[positions, targets]
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    assert heads.head_is_exact(model, input_ids, mask, positions, targets)


def test_head_is_exact_unknown_transform_is_told_and_full_forward_is_right():
    class Doubled(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config
            self.get_output_embeddings = model.get_output_embeddings

        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False):
            out = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)
            out.logits = out.logits * 2
            return out

    model = Doubled(random_model(CONFIGS["llama"]))
    batch = random_batch()
    assert not heads.head_is_exact(model, *batch)
    input_ids, mask, positions, targets = batch
    with torch.no_grad():
        own = model(input_ids, attention_mask=mask).logits.log_softmax(-1).flatten(0, 1)
        _, got = heads.full_log_probs(model, *batch)
    torch.testing.assert_close(got, own[positions, targets])


def test_token_log_probs_gradient_in_chunks_equals_cross_entropys(monkeypatch):
    monkeypatch.setitem(heads.CHUNK_ROWS, "cpu", 4)
    monkeypatch.setitem(heads.SOFTMAX_BYTES, "cpu", 2 * 50 * 8)
    model = random_model(CONFIGS["llama"])
    input_ids, mask, positions, targets = random_batch()
    logits = model(input_ids, attention_mask=mask).logits.flatten(0, 1)[positions]
    nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    hidden = heads.head_inputs(model, input_ids, mask).flatten(0, 1)[positions]
    (-heads.token_log_probs(model, hidden, targets).sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_head_inputs_leaves_no_hook_behind_when_the_forward_fails():
    model = random_model(CONFIGS["llama"])
    with pytest.raises(IndexError):
        heads.head_inputs(model, torch.full((1, 3), 1000))
    assert not model.get_output_embeddings()._forward_pre_hooks
