"""The reference of ExpertParallel, held against formulations that share nothing with it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import moe_reference as reference
from moe_reference import Layer, Origin, Tokens


def random_tokens(
    counts: list[int], num_experts: int, top_k: int, hidden: int, dtype: torch.dtype, seed: int = 0
) -> list[Tokens]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Tokens(
            torch.randn(count, hidden, generator=generator).to(dtype),
            torch.randint(-1, num_experts, (count, top_k), generator=generator, dtype=torch.int32),
            torch.rand(count, top_k, generator=generator),
        )
        for count in counts
    ]


def expert_of_row(got: reference.Dispatched, owned: list[int]) -> list[int | None]:
    experts: list[int | None] = []
    for local, expert in enumerate(owned):
        end = int(got.offsets_E[local])
        experts += [expert] * (end - len(experts))
    return experts


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("alignment", [1, 8])
def test_the_reference_is_the_dense_sum_over_experts_and_so_are_its_gradients(world_size: int, alignment: int) -> None:
    num_experts, top_k, hidden = 7, 3, 16
    layer = Layer(world_size, num_experts, torch.float32, expert_alignment=alignment)
    tokens = random_tokens([(3 * rank + 4) % 6 for rank in range(world_size)], num_experts, top_k, hidden, layer.dtype)
    generator = torch.Generator().manual_seed(1)
    matrices_EHH = torch.randn(num_experts, hidden, hidden, generator=generator, dtype=torch.float64) / hidden**0.5
    grads_y = [torch.randn(t.x_TH.shape, generator=generator) for t in tokens]

    received = reference.dispatch(layer, tokens)
    rows = [got.rows_RH.clone().requires_grad_() for got in received]
    outs = []
    for got, rows_RH, owned in zip(received, rows, reference.experts_of_ranks(layer), strict=True):
        experts = [0 if e is None else e for e in expert_of_row(got, owned)]
        outs.append(torch.tanh(torch.einsum("rh,rhg->rg", rows_RH, matrices_EHH[experts].float())))
    answers = reference.combine(layer, tokens, received, [out.detach() for out in outs])
    grads = reference.combine_backward(layer, received, [out.detach() for out in outs], grads_y)
    row_grads = [torch.autograd.grad(out, row, g)[0] for out, row, (g, _) in zip(outs, rows, grads, strict=True)]
    grads_x = reference.dispatch_backward(layer, tokens, received, row_grads)
    grads_weights = reference.weights_backward(tokens, received, [g for _, g in grads])

    for token, y, grad_y, grad_x, grad_weights in zip(tokens, answers, grads_y, grads_x, grads_weights, strict=True):
        x, weights = token.x_TH.double().requires_grad_(), token.topk_weights_TK.double().requires_grad_()
        dense = x * 0 + weights.sum() * 0
        for t, k in itertools.product(range(len(x)), range(top_k)):
            if (expert := int(token.topk_ids_TK[t, k])) != -1:
                row = torch.zeros(len(x), 1, dtype=torch.float64).index_fill(0, torch.tensor(t), 1)
                dense = dense + row * weights[t, k] * torch.tanh(x[t] @ matrices_EHH[expert])
        dense.backward(grad_y.double())
        torch.testing.assert_close(y.double(), dense.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad_x.double(), x.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad_weights.double(), weights.grad, rtol=1e-5, atol=1e-5)


def test_rows_are_expert_major_then_by_source_token_and_k() -> None:
    ids = [torch.tensor([[2, 0], [1, 2]]), torch.tensor([[2, 2]]), torch.tensor([[-1, 0]])]
    tokens = [Tokens(torch.full((len(i), 8), float(rank + 1)), i) for rank, i in enumerate(ids)]
    first, second, third = reference.dispatch(Layer(3, 4, torch.float32, expert_alignment=3), tokens)
    assert first.origins == [Origin(0, 0, 1), Origin(2, 0, 1), None, Origin(0, 1, 0), None, None]
    assert (first.rows_per_expert.tolist(), first.offsets_E.tolist()) == ([2, 1], [3, 6])
    assert first.rows_RH[:, 0].tolist() == [1, 3, 0, 1, 0, 0]
    assert second.origins == [Origin(0, 0, 0), Origin(0, 1, 1), Origin(1, 0, 0), Origin(1, 0, 1), None, None]
    assert (third.origins, third.rows_per_expert.tolist(), third.offsets_E.tolist()) == ([], [0], [0])


def test_the_highest_positions_are_dropped() -> None:
    tokens = [Tokens(torch.ones(3, 8), torch.tensor([[0, 1], [0, 1], [1, -1]]))]
    layer = Layer(1, 2, torch.float32, expert_alignment=2, max_rows=3)
    (got,) = reference.dispatch(layer, tokens)
    assert got.origins == [Origin(0, 0, 0), Origin(0, 1, 0), Origin(0, 0, 1)]
    assert (got.overflow, got.rows_per_expert.tolist(), got.offsets_E.tolist()) == (2, [2, 3], [2, 3])
    (y,) = reference.combine(layer, tokens, [got], [got.rows_RH])
    assert y[:, 0].tolist() == [2, 1, 0]


def test_owners_follow_blocks_or_the_map_given() -> None:
    assert reference.experts_of_ranks(Layer(3, 8, torch.float32)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert reference.experts_of_ranks(Layer(3, 2, torch.float32)) == [[0], [1], []]
    assert reference.experts_of_ranks(Layer(3, 4, torch.float32, expert_to_rank=(2, 0, 2, 0))) == [[1, 3], [], [0, 2]]


def test_compact_rows_are_unique_tokens_and_their_index_rebuilds_the_expert_major_rows() -> None:
    layer = Layer(3, 7, torch.bfloat16)
    tokens = random_tokens([4, 0, 5], 7, 4, 8, layer.dtype)
    received = reference.dispatch(layer, tokens)
    for got, unique in zip(received, reference.compact(layer, tokens, received), strict=True):
        assert unique.origins == sorted(set(unique.origins))
        assert torch.equal(unique.rows[unique.row_index_R.long()], got.rows_RH)


def test_sums_start_from_the_first_term_so_a_negative_zero_survives() -> None:
    layer = Layer(1, 1, torch.float32)
    tokens = [Tokens(torch.full((1, 4), -0.0), torch.tensor([[0]]))]
    received = reference.dispatch(layer, tokens)
    (y,) = reference.combine(layer, tokens, received, [received[0].rows_RH])
    assert torch.signbit(y).all()


@pytest.mark.parametrize("hidden", [4, 256, 300, 1000])
def test_dot_is_exact_on_small_integers_and_close_on_floats(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    a, b = torch.randint(-9, 10, (2, hidden), generator=generator)
    assert reference.dot(a.float(), b.float()) == (a * b).sum()
    a, b = torch.randn(2, hidden, generator=generator)
    torch.testing.assert_close(reference.dot(a, b).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_dot_adds_lanes_by_halves() -> None:
    a = torch.zeros(512)
    a[[0, 128, 1, 256]] = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])
    # Lane 0 is 2**24 + 1 (column 256), which float32 rounds to 2**24; then + 1 (lane 128) again; then lane 1 leaves 0.
    assert reference.dot(a, torch.ones(512)) == 0.0


def test_e4m3_codes_are_those_of_torch() -> None:
    every_bfloat16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    ties = torch.from_numpy(reference._e4m3_values()).float()
    ties = (ties[1:] + ties[:-1]) / 2
    values = torch.cat([every_bfloat16, ties, -ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    values = values[values.abs() <= 464]
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(reference.e4m3_codes(values.numpy()), expected)


@pytest.mark.parametrize("hidden", [8, 128, 200])
def test_fp8_blocks_are_those_of_torch_arithmetic(hidden: int) -> None:
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-2, 3)[:, None]
    x[1, :128] = 0
    q, scales = reference.quantise(x, "fp8")
    for b, block in enumerate(x.split(128, dim=1)):
        scale = block.abs().amax(1, keepdim=True) / 448
        scale[scale == 0] = 1
        assert torch.equal(scales[:, b : b + 1], scale)
        expected = (block / scale).to(torch.float8_e4m3fn)
        assert torch.equal(q[:, b * 128 : (b + 1) * 128].view(torch.uint8), expected.view(torch.uint8))
    back = reference.dequantise(q, scales, "fp8", torch.float32)
    assert ((back - x).abs() <= x.abs() / 16 + scales.max(1, keepdim=True)[0] / 2**10).all()


def test_mxfp8_scales_are_the_smallest_powers_of_two_that_fit() -> None:
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-60, 68, 2)[:, None]
    x[0, :32] = 0
    x[1, :32] = 448 * 2.0**-140
    x[2, :32] = 448.0
    q, scales = reference.quantise(x, "mxfp8")
    exponents = scales.view(torch.uint8).int() - 127
    assert exponents[0, 0] == 0 and exponents[1, 0] == -127 and exponents[2, 0] == 0
    for b, block in enumerate(x.split(32, dim=1)):
        scale = 2.0 ** exponents[:, b].double()
        amax = block.double().abs().amax(1)
        assert (amax <= 448 * scale).all()
        assert (amax > 448 * scale / 2)[2:].all()
        expected = (block / scale[:, None].float()).to(torch.float8_e4m3fn)
        assert torch.equal(q[:, b * 32 : (b + 1) * 32].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.float(), (2.0 ** exponents.double()).float())


def test_a_float32_block_too_small_to_scale_stays_finite() -> None:
    for wire in ("fp8", "mxfp8"):
        x = torch.full((3, 32), 1.0) * torch.tensor([1e-45, 2e-43, 9e-43])[:, None]
        back = reference.dequantise(*reference.quantise(x, wire), wire, torch.float32)
        assert torch.isfinite(back).all()


def test_the_wire_is_used_by_dispatch_and_by_the_gradient_of_combine_only() -> None:
    layer = Layer(2, 4, torch.float32, wire="fp8")
    tokens = random_tokens([3, 4], 4, 2, 48, torch.float32)
    received = reference.dispatch(layer, tokens)
    sent = [reference.dequantise(*reference.quantise(t.x_TH, "fp8"), "fp8", torch.float32) for t in tokens]
    plain = reference.dispatch(
        Layer(2, 4, torch.float32), [t._replace(x_TH=x) for t, x in zip(tokens, sent, strict=True)]
    )
    for got, expected in zip(received, plain, strict=True):
        assert torch.equal(got.rows_RH, expected.rows_RH)
    outs = [torch.randn(got.rows_RH.shape, generator=torch.Generator().manual_seed(1)) for got in received]
    assert all(
        torch.equal(y, expected)
        for y, expected in zip(
            reference.combine(layer, tokens, received, outs),
            reference.combine(Layer(2, 4, torch.float32), tokens, plain, outs),
            strict=True,
        )
    )
    grads = reference.combine_backward(layer, received, outs, [t.x_TH for t in tokens])
    for (grad, _), (expected, _) in zip(
        grads, reference.combine_backward(Layer(2, 4, torch.float32), plain, outs, sent), strict=True
    ):
        assert torch.equal(grad, expected)


def test_partials_are_rounded_to_the_dtype_unless_combine_sends_float32() -> None:
    ids = [torch.tensor([[0, 1, 2]]), torch.zeros(0, 3, dtype=torch.int64)]  # experts 0 and 1 on rank 0, 2 on rank 1
    tokens = [Tokens(torch.ones(len(i), 8, dtype=torch.bfloat16), i) for i in ids]
    terms = [1.0, 2.0**-8, 2.0**-8]  # 1 + 2**-8 is a tie in bfloat16 and rounds to 1
    for wire_combine, expected in ((None, 1.0), ("float32", 1.0 + 2.0**-7)):
        layer = Layer(2, 3, torch.bfloat16, wire_combine=wire_combine)
        received = reference.dispatch(layer, tokens)
        outs = [
            torch.tensor(terms[:2])[:, None].expand(2, 8).bfloat16(),
            torch.tensor(terms[2:])[:, None].expand(1, 8).bfloat16(),
        ]
        assert reference.combine(layer, tokens, received, outs)[0][0, 0] == expected, wire_combine
