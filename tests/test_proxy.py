"""The proxy is autograd's row of the language-model head's gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cluster_sft.proxy import gradient_proxy

VOCABULARY, LENGTHS, PROMPTS = 40, [9, 14, 6, 11, 3], [3, 5, 1, 8, 2]


def random_llama(*, tied=False, bias=False, dtype=torch.float64):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
        if bias:
            model.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY))
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
    return model.to(dtype).eval()


def conversations():
    """Five rows of (input_ids, labels): a prompt, then a supervised response."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        input_ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = input_ids.clone()
        labels[:prompt] = -100
        rows.append((input_ids, labels))
    rows[1][1][8] = -100  # a hole, as between two turns
    return rows


def padded(rows, side="right"):
    """Rows as (input_ids, attention_mask, labels); padding holds a real token and real labels."""
    width = max(len(ids) for ids, _ in rows)
    batch = torch.full((3, len(rows), width), 7)
    batch[1] = 0
    for i, (ids, labels) in enumerate(rows):
        columns = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
        batch[0, i, columns], batch[1, i, columns], batch[2, i, columns] = ids, 1, labels
    return batch.unbind()


def autograd_proxy(model, input_ids, labels):
    """Mean over supervised tokens of row y_t of d(cross-entropy of token t) / d(head matrix).

    The head matrix is a detached copy, so that tied input embeddings take no part.
    """
    hidden = model.model(input_ids[None]).last_hidden_state[0].detach()
    head = model.lm_head.weight.detach().clone().requires_grad_()
    total, n, nll = torch.zeros(hidden.shape[1], dtype=hidden.dtype), 0, 0.0
    for t in range(len(input_ids) - 1):
        if (target := labels[t + 1]) == -100:
            continue
        logits = nn.functional.linear(hidden[t], head, model.lm_head.bias)
        loss = nn.functional.cross_entropy(logits, target)
        (gradient,) = torch.autograd.grad(loss, head)
        total, n, nll = total + gradient[target], n + 1, nll + loss.item()
    return total / n, nll / n, n


@pytest.mark.parametrize("case", ["untied", "tied", "bias"])
def test_gradient_proxy_equals_autograds_row_of_the_head_gradient(case):
    model = random_llama(tied=case == "tied", bias=case == "bias")
    rows = conversations()
    proxy = gradient_proxy(model, *padded(rows))
    for i, (input_ids, labels) in enumerate(rows):
        embedding, nll, n = autograd_proxy(model, input_ids, labels)
        assert (proxy.embedding[i] - embedding).norm() <= 1e-9 * embedding.norm()
        assert proxy.nll[i].item() == pytest.approx(nll, rel=1e-9)
        assert proxy.n_tokens[i] == n


def test_gradient_proxy_distinct_targets_equals_the_backward_pass_of_the_sequence_loss():
    model = random_llama()
    input_ids = torch.arange(1, 10)[None]
    labels = torch.where(torch.arange(9) < 3, -100, input_ids)
    model(input_ids, labels=labels).loss.backward()
    # With every target different, row y_t collects, besides its own token, what the others' wrong
    # predictions pull towards y_t: p_s(y_t) h_s.
    with torch.no_grad():
        hidden = model.model(input_ids).last_hidden_state[0]
        p = model(input_ids).logits[0].softmax(-1)
    steps = range(2, 8)
    rows = sum(
        model.lm_head.weight.grad[t + 2]
        - sum(p[s, t + 2] * hidden[s] for s in steps if s != t) / len(steps)
        for t in steps
    )
    proxy = gradient_proxy(model, input_ids, torch.ones_like(input_ids), labels)
    torch.testing.assert_close(proxy.embedding[0], rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradient_proxy_is_unchanged_by_batch_size_padding_side_and_order(dtype):
    model, rows = random_llama(dtype=dtype), conversations()
    whole = gradient_proxy(model, *padded(rows))
    left = gradient_proxy(model, *padded(rows, "left"))
    backwards = gradient_proxy(model, *padded(rows[::-1]))
    alone = torch.cat([gradient_proxy(model, *padded([row])).embedding for row in rows])
    for other in (left.embedding, backwards.embedding.flip(0), alone):
        torch.testing.assert_close(other, whole.embedding)
    torch.testing.assert_close(left.nll, whole.nll)
    assert whole.embedding.dtype == dtype


def test_gradient_proxy_bf16_model_gives_float32():
    proxy = gradient_proxy(random_llama(dtype=torch.bfloat16), *padded(conversations()))
    assert proxy.embedding.dtype == proxy.nll.dtype == torch.float32


def test_gradient_proxy_certain_tokens_are_a_zero_row():
    model = random_llama(bias=True)
    with torch.no_grad():
        model.lm_head.bias[5] = 1e4
    input_ids = torch.tensor([[3, 5, 5]])
    proxy = gradient_proxy(model, input_ids, torch.ones_like(input_ids), input_ids)
    assert not proxy.embedding.any()
    assert proxy.n_tokens.tolist() == [2]


def test_gradient_proxy_row_without_supervised_tokens_is_zero():
    rows = conversations()
    rows[2] = (rows[2][0], torch.full_like(rows[2][1], -100))
    proxy = gradient_proxy(random_llama(), *padded(rows))
    assert not proxy.embedding[2].any()
    assert proxy.n_tokens.tolist() == [6, 8, 0, 3, 1]
    assert proxy.nll[2] == 0


def test_gradient_proxy_non_finite_row_leaves_its_neighbours_alone():
    model, rows = random_llama(), conversations()
    for ids, labels in rows:
        ids[ids == 39], labels[labels == 39] = 1, 1
    expected = gradient_proxy(model, *padded(rows)).embedding
    rows[3][0][2] = 39
    with torch.no_grad():
        model.model.embed_tokens.weight[39] = torch.inf
    got = gradient_proxy(model, *padded(rows)).embedding
    assert not torch.isfinite(got[3]).any()
    torch.testing.assert_close(got[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])


def test_gradient_proxy_keeps_the_mode_of_every_module_and_no_graph():
    model = random_llama().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    proxy = gradient_proxy(model, *padded(conversations()))
    assert [module.training for module in model.modules()] == before
    assert not proxy.embedding.requires_grad


def test_gradient_proxy_takes_ids_of_any_integer_type():
    model = random_llama()
    batch = padded(conversations())
    wide = gradient_proxy(model, *batch)
    narrow = gradient_proxy(model, *(x.to(torch.int32) for x in batch))
    assert torch.equal(wide.embedding, narrow.embedding)


def test_gradient_proxy_unlike_shapes_is_an_error():
    input_ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="one shape"):
        gradient_proxy(random_llama(), input_ids, input_ids, input_ids[:, :2])
