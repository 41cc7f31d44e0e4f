"""How `push` cuts a call of ExpertParallel on GPUs into ranges, chunks and slots: see csrc/cuda/moe_push.cuh.

The same on every rank, from what the ranks agree on: nobody is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from a2a.algorithms.moe_base import MoeSpec

TEAMS, MOST_BLOCKS = 2, 256  # the kernels' own constants
SUMS_A_SM = 3  # blocks of a summing kernel that share an SM
# SMs of a sending kernel, of a summing one: what fills the link and leaves SMs for the rest
SENDERS, SUMMERS = 12, 56
CHUNK_BYTES = 8 << 20  # of tokens that a rank brings: long enough to hide a gate, short enough to overlap
MOST_CHUNKS = 60
STAGING_BYTES, MOST_STAGING_BYTES = 256 << 20, 2 << 30  # for a peer, for all of them


@dataclass(frozen=True)
class Geometry:
    """How the calls of an instance are cut."""

    senders: int
    summers: int
    chunks: int
    chunk_tokens: int  # the most of a range
    ring: int
    slot_bytes: int
    meta_bytes: int
    stage_bytes: int

    @property
    def ranges(self) -> int:
        return self.senders * TEAMS

    @property
    def starts(self) -> int:
        return self.ranges * self.chunks + 1

    @staticmethod
    def of(spec: MoeSpec, world_size: int) -> Geometry:
        senders = SENDERS if spec.num_sms is None else max(1, min(SENDERS, spec.num_sms // 5))
        wire = round_up(spec.hidden, 16) + round_up(spec.scale_blocks * (4 if spec.wire == "fp8" else 1), 16)
        sums = spec.hidden * 4 if spec.wide_sums else spec.row_bytes
        slot = round_up(max(wire if spec.wire else spec.row_bytes, sums), 128)
        meta = 16 + 16 * spec.top_k
        peers, ranges = max(world_size - 1, 1), senders * TEAMS
        most = max(1, min(STAGING_BYTES * peers, MOST_STAGING_BYTES) // 2 // (peers * ranges * (slot + meta)))
        each = max(1, -(-spec.max_tokens // ranges))  # tokens of a range
        chunks = max(1, min(MOST_CHUNKS, round(spec.max_tokens * spec.row_bytes / CHUNK_BYTES), each))
        while 2 * -(-each // chunks) > most and -(-each // chunks) > 1:
            chunks += 1  # two chunks must fit a ring
        chunk_tokens = -(-each // chunks)
        # With one chunk nothing goes on beside the sums.
        sms = min(MOST_BLOCKS // SUMS_A_SM, SUMMERS if chunks > 1 else 1 << 30, (spec.num_sms or 1 << 30) // 2)
        summers = max(1, sms) * SUMS_A_SM
        ring = max(2, min(most, chunk_tokens * chunks))
        stage = round_up(8 * (world_size * MOST_BLOCKS + world_size), 256)
        return Geometry(
            senders,
            summers,
            chunks,
            chunk_tokens,
            ring,
            slot,
            meta,
            stage + 2 * peers * ranges * ring * (slot + meta) + 512,
        )


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


__all__ = [
    *("CHUNK_BYTES", "MOST_BLOCKS", "MOST_CHUNKS", "MOST_STAGING_BYTES", "SENDERS", "STAGING_BYTES", "SUMMERS"),
    *("SUMS_A_SM", "TEAMS", "Geometry", "round_up"),
]
