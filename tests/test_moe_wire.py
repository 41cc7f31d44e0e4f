"""ExpertParallel's wire formats: quantised while sending, dequantised or handed out on arrival, bit for bit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_reference as reference
from moe_cases import Answer, Case, assert_answers, assert_same_bits, assert_step, with_options

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize(("hidden", "dtype"), [(8, BF16), (128, F16), (200, F32), (304, BF16)])
def test_wire_formats_quantise_while_sending(world: Any, wire: str, hidden: int, dtype: torch.dtype) -> None:
    assert_step(world, with_options(Case(hidden=hidden, dtype=dtype), wire=wire))


@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize("scale", [1e-45, 1e-43, 1e-41, 1e30])
def test_wire_formats_at_the_ends_of_float32(world: Any, wire: str, scale: float) -> None:
    assert_step(world, with_options(Case(dtype=F32, scale=scale), wire=wire))


def wire_rows(case: Case) -> Answer:
    """A step on quantised rows, its backward by hand."""
    with contextlib.closing(case.expert_parallel()) as ep:
        (x_TH, ids_TK, weights_TK), grad_TH = case.inputs(dist.get_rank())
        (q_RH, scales_RB), _, routing = ep.dispatch(x_TH.requires_grad_(), ids_TK, weights_TK)
        valid_R = routing.row_rank_R >= 0
        out_RH = torch.zeros(len(q_RH), case.hidden, dtype=case.dtype)
        wire = dict(case.options)["wire"]
        out_RH[valid_R] = reference.dequantise(q_RH[valid_R], scales_RB[valid_R], wire, case.dtype)
        y_TH = ep.combine(out_RH, routing)
        with pytest.raises(RuntimeError, match="dispatch_backward"):
            y_TH.backward(grad_TH)
        with torch.no_grad():
            grad_out, grad_row_weights_R = ep.combine_backward(grad_TH, out_RH, routing)
            grad_x, grad_weights = ep.dispatch_backward(grad_out, routing, grad_row_weights_R)
    return {
        "q": q_RH.view(torch.uint8),
        "scales": scales_RB[valid_R].view(torch.uint8),
        "out": out_RH,
        "y": y_TH.detach(),
        "grad_out": grad_out,
        "grad_row_weights_R": grad_row_weights_R,
        "grad_x": grad_x,
        "grad_weights": grad_weights,
    }


def expected_wire_rows(case: Case, world_size: int) -> list[Answer]:
    layer = case.layer(world_size)
    tokens, grads_y = zip(*(case.inputs(rank) for rank in range(world_size)), strict=True)
    received = reference.dispatch(layer, tokens)
    quantised = [reference.quantise(t.x_TH, str(layer.wire)) for t in tokens]
    outs = [got.rows_RH for got in received]
    ys = reference.combine(layer, tokens, received, outs)
    grads = reference.combine_backward(layer, received, outs, grads_y)
    grads_x = reference.dispatch_backward(layer, tokens, received, [g for g, _ in grads])
    grads_weights = reference.weights_backward(tokens, received, [g for _, g in grads])
    answers = []
    for rank, got in enumerate(received):
        q_RH, scales = torch.zeros(len(got.origins), case.hidden, dtype=torch.uint8), []
        for row, origin in enumerate(got.origins):
            if origin is not None:
                q_TH, scales_TB = quantised[origin.source]
                q_RH[row] = q_TH[origin.token].view(torch.uint8)
                scales.append(scales_TB[origin.token].view(torch.uint8))
        names = ("q", "scales", "out", "y", "grad_out", "grad_row_weights_R", "grad_x", "grad_weights")
        tensors = (q_RH, torch.stack(scales), outs[rank], ys[rank], *grads[rank], grads_x[rank], grads_weights[rank])
        answers.append(dict(zip(names, tensors, strict=True)))
    return answers


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
@pytest.mark.parametrize(("hidden", "dtype", "scale"), [(64, BF16, 1.0), (200, F16, 1.0), (72, F32, 3e-44)])
def test_rows_wire_hands_out_the_quantised_rows_and_their_scales(
    world: Any, wire: str, hidden: int, dtype: torch.dtype, scale: float
) -> None:
    case = Case(hidden=hidden, dtype=dtype, scale=scale, tokens=(5, 9, 4))
    case = with_options(case, wire=wire, rows="wire", expert_alignment=16)
    assert_answers(world.run(wire_rows, case=case), expected_wire_rows(case, world.size))


def payload(case: Case, wire: str) -> tuple[Tensor, Tensor]:
    """Every e4m3 code but NaN, under scales that no quantiser here would choose."""
    count, blocks = case.inputs(dist.get_rank())[0].x_TH.shape[0], -(-case.hidden // reference.WIRE_BLOCK[wire])
    codes = torch.arange(count * case.hidden).reshape(count, case.hidden) * 7 % 256
    codes[codes % 128 == 127] = 0
    scales = torch.arange(count * blocks).reshape(count, blocks) % 11
    q_TH = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    if wire == "fp8":
        return q_TH, scales * 0.37 + 0.01
    return q_TH, (scales + 120).to(torch.uint8).view(torch.float8_e8m0fnu)


def quantised_before(case: Case) -> None:
    wire = dict(case.options)["wire"]
    _, ids_TK, _ = case.inputs(dist.get_rank())[0]
    q_TH, scales_TB = payload(case, wire)
    with contextlib.closing(case.expert_parallel(rows="wire")) as ep:
        (q_RH, scales_RB), _, routing = ep.dispatch((q_TH, scales_TB), ids_TK)
    with contextlib.closing(case.expert_parallel()) as ep:
        rows_RH, _, _ = ep.dispatch((q_TH, scales_TB), ids_TK)
        assert_same_bits(rows_RH, reference.dequantise(q_RH, scales_RB, wire, case.dtype), "dequantised rows")
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (q_TH.view(torch.uint8), scales_TB.view(torch.uint8)))
    for rank, (q, scales) in enumerate(everybody):
        theirs_R = routing.row_rank_R == rank
        tokens_R = routing.row_token_R[theirs_R].long()
        assert_same_bits(q_RH[theirs_R].view(torch.uint8), q[tokens_R], f"q of rank {rank}")
        assert_same_bits(scales_RB[theirs_R].view(torch.uint8), scales[tokens_R], f"scales of rank {rank}")


@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_a_payload_quantised_before_passes_through_with_its_scales(world: Any, wire: str) -> None:
    world.run(quantised_before, case=with_options(Case(hidden=304, tokens=(20, 30)), wire=wire))
