"""Mixture of Experts on GPUs by stores into the peers' memory.

Dispatch: few SMs store each token once into a slot at every rank that holds one of its experts; chunk by chunk behind
the signals, slots are expanded into rows. Combine: the rank that holds a token's rows sums them and stores the sum at
the token's owner, who adds the ranks' sums in rank order. csrc/cuda/moe_push*.cu have the protocols.

Decisions:

* **Three streams.** What sends runs on the caller's; gates, which are one block each and wait for a chunk of every
  peer, on a second; what works on a chunk that has come on a third, behind its gate. So a chunk is expanded on all SMs
  that are free while later ones travel, and only senders and one gate at a time occupy an SM for waiting. The caller's
  stream goes on when the third has ended. Small requests are one chunk and stay on the caller's stream.
* **The number of chunks follows from `max_tokens`**, since all ranks must cut alike and nothing may be asked of them.
* **The host waits only for the row count**, which a gate stores into pinned memory, and not at all with `max_rows`.
* **With ready flags** (`ready_rows`) rows are counted as they are stored, and a combine whose rows are still being made sums
  in passes: one block waits for the flags of a part of the rows, then all summers take the tokens that end there. Every
  token chunk has rows of all experts, so waiting chunk by chunk would wait for the last expert at once.
* **Slots come from one buffer a communicator**, the largest that an instance has needed; instances share it.

Wins wherever GPUs reach each other's memory. `direct`, which would store rows where they belong, moves fewer bytes from
about eight ranks on.
"""

from __future__ import annotations

import ctypes
import itertools
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from a2a.algorithms.base import Cost, Part, Request
from a2a.algorithms.moe_base import (
    DTYPE_CODE,
    SCALE_DTYPE,
    WIRE_CODE,
    Dispatched,
    Moe,
    MoeExchange,
    MoeSpec,
    Origins,
    routed_bytes,
)
from a2a.algorithms.moe_push_geometry import (
    CHUNK_BYTES,
    MOST_BLOCKS,
    MOST_CHUNKS,
    SENDERS,
    SUMS_A_SM,
    TEAMS,
    Geometry,
    round_up,
)
from a2a.algorithms.moe_push_order import PushOrder
from a2a.algorithms.moe_push_ready import PushReady
from a2a.errors import PeerTimeoutError
from a2a.kernels import cpu, cuda, cuda_params

if TYPE_CHECKING:
    from a2a.comm import Communicator

_TEAM, _EXPAND_THREADS, _SUM_THREADS = 512, 512, 128  # the kernels' own constants
_TILE_BYTES = 1 << 10, 2 << 10, 16 << 10  # of a row that a warp moves by a bulk copy: small requests want many warps
_FEW_TOKENS = 256
_TILER_BYTES = 112 << 10  # of a block's tiles
_SUM_DEEP, _SUM_BYTES = 4, 72 << 10  # vectors of a lane in a piece that a summing warp takes, at most; a block's pieces
_PARTS = ("send", "expand", "dots", "sum")
_DOT_THREADS, _DOT_SPOTS, _DOT_DEEP = 320, 10, 4  # moe_push_dots: a block's threads; a warp's pieces, and their size
_MOST_EXPERTS, _PLANNER_BYTES = 8192, 72 << 10  # a team's counters lie in shared memory
_NO_LIMIT = 0xFFFFFFFF


class MoePush(Moe):
    """See the module's docstring."""

    name: ClassVar[str] = "push"
    device_type: ClassVar[str] = "cuda"

    def unsupported(self, request: Request, comm: Communicator) -> str | None:
        if reason := super().unsupported(request, comm):
            return reason
        if request.get("num_experts") > _MOST_EXPERTS:
            return f"it counts at most {_MOST_EXPERTS} experts; there are {request.get('num_experts')}"
        return None

    def cost(self, request: Request, comm: Communicator) -> Cost:
        rows, distinct = routed_bytes(request, comm)
        remote = distinct * (comm.world_size - 1) // comm.world_size
        # Rows are expanded while others travel: the last chunk's expansion shows.
        chunks = min(MOST_CHUNKS, max(1, request.num_bytes // CHUNK_BYTES))
        launches, signals = Part("launch", times=len(_PARTS)), Part("signal", times=2)
        parts = (launches, signals, Part("push", remote), Part("copy", rows // chunks))
        copied = rows + distinct + remote
        return Cost(steps=2, scale_up_bytes=remote, copied_bytes=copied, sms=SENDERS, parts=parts)

    def open(self, comm: Communicator, spec: MoeSpec) -> MoeExchange:
        return PushExchange(comm, spec)


class PushExchange(PushOrder, MoeExchange):
    """The GPU kernels of one ExpertParallel."""

    plan_size: int
    ready: PushReady | None

    def __init__(self, comm: Communicator, spec: MoeSpec) -> None:
        self._comm, self._spec, self._lib = comm, spec, cuda.lib()
        self._transport = transport = comm.require_transport("ExpertParallel")
        world, device = comm.world_size, comm.device
        self._geometry = g = Geometry.of(spec, world)
        what = spec.identity()
        self._local = spec.local_experts(comm.rank)
        most_local = max(spec.local_experts(rank) for rank in range(world))
        self._counts = transport.alloc(2 * world * (1 + g.starts + most_local) * 8, what)
        stage = transport.shared("moe_push", g.stage_bytes)
        self.ready = PushReady(spec, comm) if spec.ready_rows else None
        starts, numbers = 2 * world * g.starts + world + 1, spec.max_tokens * world * (1 + spec.top_k)
        self.plan_size = (2 if self.ready else 0) + starts + 2 * most_local + numbers
        homes, found = [], [0] * world
        for owner in spec.expert_to_rank:
            homes.append(owner << 16 | found[owner])
            found[owner] += 1
        self._homes = torch.tensor(homes, dtype=torch.int64).to(torch.int32).to(device)
        columns = spec.num_experts + world
        planners = max(1, min(_TEAM // 32, _PLANNER_BYTES // (4 * columns) - 2))
        words = 64 + g.ranges * columns + most_local * world + 4 + spec.max_tokens * spec.top_k + 16
        self._workspace = torch.zeros(words, dtype=torch.int32, device=device)
        self._load((planners + 2) * 4 * columns)
        place = transport.place
        stage_words = round_up(8 * (world * MOST_BLOCKS + world), 256)
        half = (stage.num_bytes - stage_words) // 2 // 256 * 256
        self._m = cuda_params.Moe(
            place=cuda_params.Place(place.base, place.window, place.host, int(comm.timeout_s * 1e9), comm.rank, 0),
            stage=stage.address, data=stage.address + stage_words, half=half, counts=self._counts.address,
            workspace=self._workspace.data_ptr(), homes=self._homes.data_ptr(), max_tokens=spec.max_tokens,
            experts=spec.num_experts, local_experts=self._local, most_local=most_local,
            alignment=spec.expert_alignment, ring=g.ring, planners=planners,
            ready=self.ready.memory.data_ptr() if self.ready else 0, words=self.ready.words if self.ready else 0,
        )  # fmt: skip
        assert half >= max(world - 1, 1) * g.ranges * g.ring * (g.slot_bytes + g.meta_bytes)
        self._asks = spec.asks()
        if self.ready:
            self.ready.place = self._m.place
        self._host = torch.zeros(4, dtype=torch.int64, pin_memory=True)
        self._tickets = itertools.count(1)
        self._events = [cuda.event() for _ in range(g.chunks + 3)]
        self._sequences: dict[Any, tuple[Any, int]] = {}
        self._closed = False
        torch.cuda.synchronize(device)  # the workspace and homes are there before any stream uses them

    # ---- kernels

    def _load(self, planner_bytes: int) -> None:
        spec, g, place = self._spec, self._geometry, self._transport.place
        tile_bytes = _TILE_BYTES[(g.chunks > 1) + (spec.max_tokens > _FEW_TOKENS)]
        defines = {
            "WORLD": self._comm.world_size, "TOP_K": spec.top_k, "HIDDEN": spec.hidden, "DTYPE": DTYPE_CODE[spec.dtype],
            "WIRE": WIRE_CODE[spec.wire], "RANGES": g.ranges, "CHUNKS": g.chunks, "ROWS_WIRE": int(spec.rows == "wire"),
            "COMPACT": int(spec.layout == "compact"), "DROP": int(spec.overflow == "drop"),
            "WIDE_SUMS": int(spec.wide_sums), "TEAM": _TEAM, "TILE_BYTES": tile_bytes,
            "SPOTS": max(8, spec.top_k), "READY": spec.ready_rows or 0,
        }  # fmt: skip
        ring_bytes = (
            _SUM_THREADS // 32 * defines["SPOTS"] * 512 * (2 if spec.wide_sums else 1)
        )  # with one vector a lane
        deep = defines["SUM_DEEP"] = max(
            d for d in (1, 2, 4) if d == 1 or (d <= _SUM_DEEP and d * ring_bytes <= _SUM_BYTES)
        )
        sms = torch.cuda.get_device_properties(place.device).multi_processor_count
        most = sms if spec.num_sms is None else min(sms, spec.num_sms)
        expanders, finishers = max(1, most - g.senders) * 2, most * SUMS_A_SM
        if g.chunks > 1:
            finishers = max(1, finishers - g.summers)
        self._calls: dict[str, tuple[cuda.Call, Any]] = {}
        with torch.cuda.device(place.device):
            parts = cuda.modules([f"moe_push_{p}" for p in _PARTS], place, defines)
            modules = dict(zip(_PARTS, parts, strict=True))
        quantised = ["_quantised"] if spec.wire else []
        for suffix in ["", "_gradient", *quantised]:
            self._add(modules["send"], f"send{suffix}", cuda_params.Send, g.senders, _TEAM * TEAMS,
                      0 if suffix == "_gradient" else planner_bytes * TEAMS)  # fmt: skip
        for suffix in ["_gradient", "_gradient_weighted", *(["", *quantised] if spec.wire else [])]:
            self._add(modules["expand"], f"expand{suffix}", cuda_params.Expand, expanders, _EXPAND_THREADS)
        if not spec.wire:
            tile = round_up(-(-spec.row_bytes // -(-spec.row_bytes // tile_bytes)), 16)
            tilers = min(16, _TILER_BYTES // tile)
            self._add(modules["expand"], "expand", cuda_params.Expand, expanders, 32 * tilers, tilers * tile)
        dot_bytes = _DOT_THREADS // 32 * _DOT_SPOTS * 512 * _DOT_DEEP
        self._add(modules["dots"], "dots", cuda_params.Expand, expanders // 2, _DOT_THREADS, dot_bytes)
        self._add(modules["expand"], "gate", cuda_params.Gate, 1, 1024)
        self._add(modules["expand"], "gate_counts", cuda_params.Counts, 1, 1024)
        self._add(modules["expand"], "refuse", cuda_params.Gate, 1, 128)
        if spec.ready_rows:
            self._add(modules["expand"], "gate_rows", cuda_params.RowsGate, 1, 1024)
        for suffix in ["", "_weighted"]:
            self._add(modules["sum"], f"sum{suffix}", cuda_params.Sum, g.summers, _SUM_THREADS, deep * ring_bytes)
            self._add(modules["sum"], f"finish{suffix}", cuda_params.Sum, finishers, _SUM_THREADS, deep * ring_bytes)

    def _add(self, module: Any, name: str, params: Any, grid: int, block: int, shared_bytes: int = 0) -> None:
        place, values = self._transport.place, params()
        first = name.startswith(("send", "sum", "refuse", "gate_rows"))
        # With ready flags there is an event between the gate of a dispatch and its rows.
        behind = not first and not (self.ready and name in ("expand", "expand_quantised"))
        call = cuda.Call(
            function=module.function(f"moe_push_{name}", shared_bytes), context=place.context, failure=place.host,
            params=ctypes.addressof(values), params_bytes=ctypes.sizeof(values), grid=grid, block=block,
            shared_bytes=shared_bytes, programmatic=int(self._geometry.chunks == 1 and behind),
        )  # fmt: skip
        self._calls[name] = (call, values)

    def _run(self, op: str, key: tuple[Any, ...], make: Any) -> None:
        """Launch the sequence `key`, which `make` lists once, on the current stream and the communicator's two others."""
        if key not in self._sequences:
            steps = make()
            self._sequences[key] = ((cuda.Step * len(steps))(*steps), len(steps))
        steps, count = self._sequences[key]
        streams = (c_void_p * 3)(*self._transport.streams())
        result = self._lib.a2a_cuda_run(steps, count, streams)
        if result:
            self._comm.raise_failure(cpu.FAILED if result == cuda.FAILED else result, op)

    def _begin(self, op: str, num_tokens: int, plan: torch.Tensor) -> cuda_params.Moe:
        agree, text = self._asks[op]
        number = self._transport.request(agree, 0, text)
        m = self._m
        m.place.text, m.digest = number & 0xFFFF, self._transport.digest(number)
        m.tokens, m.plan = num_tokens, plan.data_ptr()
        return m

    def _set(self, m: cuda_params.Moe, name: str, **values: int) -> None:
        _, params = self._calls[name]
        params.m = m
        for field, value in values.items():
            setattr(params, field, value)

    # ---- collectives

    def dispatch(
        self,
        x_TH: torch.Tensor,
        scales: torch.Tensor | None,
        topk_ids_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
    ) -> Dispatched:
        x_TH = _aligned(x_TH)
        spec, num_tokens, device = self._spec, topk_ids_TK.shape[0], self._comm.device
        suffix = "" if scales is None else "_quantised"
        ids = torch.empty(topk_ids_TK.shape, dtype=torch.int32, device=device)
        plan = torch.empty(self.plan_size, dtype=torch.int32, device=device)
        offsets, counts, overflow = (
            torch.empty(n, dtype=torch.int32, device=device) for n in (self._local, self._local, 1)
        )
        exact = spec.max_rows is None
        # What rows are gathered by: zero past the end, too. Made before the fork, whose other streams write it.
        index = torch.zeros(spec.max_rows or 0 if spec.layout == "compact" else 0, dtype=torch.int32, device=device)
        if exact and torch.cuda.is_current_stream_capturing():
            self._comm.check_open("dispatch")
            raise RuntimeError(
                "dispatch: the host must wait for the number of rows, which a CUDA graph can't; make the ExpertParallel "
                "with max_rows=N"
            )
        ticket = next(self._tickets) if exact else 0
        m = self._begin("dispatch", num_tokens, plan)
        self._set(m, f"send{suffix}", x=x_TH.data_ptr(), x_scales=_pointer(scales), ids=topk_ids_TK.data_ptr(),
                  weights=_pointer(weights_TK), ids_out=ids.data_ptr(), ids_bytes=topk_ids_TK.element_size())  # fmt: skip
        self._set(m, "gate_counts", offsets=offsets.data_ptr(), counts=counts.data_ptr(), overflow=overflow.data_ptr(),
                  host=self._host.data_ptr() if exact else 0, ticket=ticket,
                  capacity=_NO_LIMIT if spec.max_rows is None else spec.max_rows)  # fmt: skip
        self._set(m, "gate")
        key = ("dispatch", suffix)
        self._run("dispatch", (*key, 0), lambda: self._spread(f"send{suffix}", f"expand{suffix}", True)[0])
        height, capacity = self._heights(ticket)
        if exact and spec.layout == "compact":
            index = torch.empty(capacity, dtype=torch.int32, device=device)
        out = self._outputs(height, capacity, offsets, counts, overflow, ids, plan, index)
        self._set(m, f"expand{suffix}", rows=out.rows.data_ptr(), scales=out.scales.data_ptr(),
                  weights=out.row_weights_R.data_ptr(), rank=out.row_rank_R.data_ptr(), token=out.row_token_R.data_ptr(),
                  k=out.row_k_R.data_ptr(), index=out.row_index_R.data_ptr(), x=x_TH.data_ptr(),
                  x_scales=_pointer(scales), ids=ids.data_ptr(), topk_weights=_pointer(weights_TK), capacity=capacity,
                  compact_capacity=height)  # fmt: skip
        self._run("dispatch", (*key, 1), lambda: self._spread(f"send{suffix}", f"expand{suffix}", True)[1])
        return out

    def _heights(self, ticket: int) -> tuple[int, int]:
        """(rows of the matrix, rows that are described)."""
        spec = self._spec
        if spec.max_rows is not None:
            compact = spec.layout == "compact"
            return spec.compact_rows(self._comm.world_size) if compact else spec.max_rows, spec.max_rows
        place = self._transport.place
        result = self._lib.a2a_cuda_await(self._host.data_ptr(), ticket, place.host, 2 * self._comm.timeout_s + 60)
        if result == -1:
            self._comm.raise_failure(cpu.FAILED, "dispatch")
        if result:
            raise PeerTimeoutError(
                f"dispatch: rank {self._comm.rank}'s GPU has not begun it within {2 * self._comm.timeout_s + 60:.0f} s; "
                f"is something before it on the stream that never ends?",
                rank=self._comm.rank, op="dispatch",
            )  # fmt: skip
        _, padded, _, distinct = self._host.tolist()
        return (distinct if spec.layout == "compact" else padded), padded

    def _outputs(self, height: int, capacity: int, offsets: torch.Tensor, counts: torch.Tensor, overflow: torch.Tensor,
                 ids: torch.Tensor, plan: torch.Tensor, index: torch.Tensor) -> Dispatched:  # fmt: skip
        spec, device = self._spec, self._comm.device
        if spec.rows == "wire":
            assert spec.wire is not None
            rows = torch.empty(height, spec.hidden, dtype=torch.float8_e4m3fn, device=device)
            scales = torch.empty(height, spec.scale_blocks, dtype=SCALE_DTYPE[spec.wire], device=device)
        else:
            rows = torch.empty(height, spec.hidden, dtype=spec.dtype, device=device)
            scales = torch.empty(0, device=device)
        rank, token, k = (torch.empty(capacity, dtype=torch.int32, device=device) for _ in range(3))
        weights = torch.empty(capacity, device=device)
        return Dispatched(rows, scales, counts, offsets, weights, rank, token, k, index, overflow, ids, plan)

    def combine(self, rows_RH: torch.Tensor, weights_R: torch.Tensor | None, origins: Origins) -> torch.Tensor:
        return self._combine(_aligned(rows_RH), weights_R, origins, False)

    def combine_marked(self, rows_RH: torch.Tensor, weights_R: torch.Tensor | None, origins: Origins) -> torch.Tensor:
        return self._combine(rows_RH, weights_R, origins, True)

    def _combine(
        self, rows_RH: torch.Tensor, weights_R: torch.Tensor | None, origins: Origins, marked: bool
    ) -> torch.Tensor:
        suffix, num_tokens = "" if weights_R is None else "_weighted", origins.topk_ids_TK.shape[0]
        y = torch.empty(num_tokens, self._spec.hidden, dtype=self._spec.dtype, device=self._comm.device)
        m = self._begin("combine", num_tokens, origins.plan)
        for name in (f"sum{suffix}", f"finish{suffix}"):
            self._set(m, name, rows=rows_RH.data_ptr(), weights=_pointer(weights_R), row_grads=0, ids=0, y=y.data_ptr(),
                      weight_grads=0, compact=0, brings=0)  # fmt: skip
        self._set(m, "gate")
        if marked:
            self._set(m, "gate_rows")
        key = ("combine", suffix, marked)
        self._run("combine", key, lambda: self._gather(f"sum{suffix}", f"finish{suffix}", marked))
        return y

    def combine_backward(
        self, grad_TH: torch.Tensor, rows_RH: torch.Tensor | None, weights_R: torch.Tensor | None, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_TH, rows_RH = _aligned(grad_TH), None if rows_RH is None else _aligned(rows_RH)
        num_tokens, num_rows, device = grad_TH.shape[0], origins.row_rank_R.shape[0], self._comm.device
        expand = "dots" if rows_RH is not None else "expand_gradient" + ("" if weights_R is None else "_weighted")
        grad_rows = torch.empty(num_rows, self._spec.hidden, dtype=self._spec.dtype, device=device)
        make = torch.zeros if rows_RH is None else torch.empty
        grad_weights = make(num_rows, dtype=torch.float32, device=device)
        m = self._begin("combine_backward", num_tokens, origins.plan)
        self._set(m, "send_gradient", x=grad_TH.data_ptr())
        self._set(m, "gate")
        self._set(m, expand, rows=grad_rows.data_ptr(), weights=_pointer(weights_R), x=grad_TH.data_ptr(),
                  out_rows=_pointer(rows_RH), grad_weights=grad_weights.data_ptr(), capacity=num_rows)  # fmt: skip
        self._run(
            "combine_backward", (expand,), lambda: [*itertools.chain(*self._spread("send_gradient", expand, False))]
        )
        return grad_rows, grad_weights

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_weights_R: torch.Tensor, origins: Origins
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_rows = _aligned(grad_rows)
        spec, num_tokens, device = self._spec, origins.topk_ids_TK.shape[0], self._comm.device
        grad_x = torch.empty(num_tokens, spec.hidden, dtype=spec.dtype, device=device)
        grad_weights = torch.empty(num_tokens, spec.top_k, dtype=torch.float32, device=device)
        m = self._begin("dispatch_backward", num_tokens, origins.plan)
        for name in ("sum", "finish"):
            self._set(m, name, rows=grad_rows.data_ptr(), weights=0, row_grads=grad_weights_R.data_ptr(),
                      ids=origins.topk_ids_TK.data_ptr(), y=grad_x.data_ptr(), weight_grads=grad_weights.data_ptr(),
                      compact=int(spec.layout == "compact"), compact_rows=grad_rows.shape[0],
                      brings=1)  # fmt: skip
        self._set(m, "gate")
        self._run("dispatch_backward", ("dispatch_backward",), lambda: self._gather("sum", "finish"))
        return grad_x, grad_weights

    def refuse(self, op: str, why: str) -> None:
        if self._closed or self._comm.closed:
            return
        m = self._begin(op, 0, self._homes)
        self._set(m, "refuse")
        self._run(op, ("refuse",), lambda: [self._launch("refuse", 0)])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._transport.release(self._counts)
            self._transport.outlive(self._workspace, self._homes)
            if self.ready:
                self._transport.outlive(self.ready.memory)
                self._events.append(self.ready.close())
            for event in self._events:
                self._lib.a2a_cuda_event_free(event)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Rows at an address that vectors of 16 bytes take."""
    return rows.clone() if rows.data_ptr() % 16 else rows


def _pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


__all__ = ["MoePush", "PushExchange"]
