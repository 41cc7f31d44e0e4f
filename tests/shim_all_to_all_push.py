"""csrc/cuda/all_to_all_push.cu on the CPU: made small, and its mutants. cuda_shim/all_to_all_push.cpp has the scenarios."""

from __future__ import annotations

from shim_build import Kernel, Mutant, Replacement

SOURCE = "all_to_all_push.cu"

KERNEL = Kernel(
    "all_to_all_push",
    {"FLAG_BYTES": 960, "CHUNK_BYTES": 512, "TEAMS": 2},
    (
        Replacement(SOURCE, "kTeam = 512 / kTeams", "kTeam = 64 / kTeams"),
        Replacement(SOURCE, "kBlocks = 24", "kBlocks = 3"),
        Replacement(SOURCE, "kChannelBytes = 32 << 10", "kChannelBytes = 4 << 10"),
    ),
)


# The same kernel, of whose call only lists on the GPU know.
RAGGED = Kernel("all_to_all_ragged", {**KERNEL.defines, "RAGGED": 1}, KERNEL.small, "all_to_all_ragged")


def mutant(name: str, argument: str, old: str, new: str, *scenarios: str, file: str = SOURCE) -> Mutant:
    return Mutant(name, argument, Replacement(file, old, new), scenarios)


BARRIER = "    barrier();\n"
RELEASE = "    if (t == 0) ptx::store_release_sys(word, value);\n"
VOLATILE = "    if (t == 0) *const_cast<volatile std::uint32_t*>(word) = value;\n"
EPOCHS = "w[0].w != epoch || w[1].w != epoch || w[2].w != epoch || w[3].w != epoch"
DIRECT_LOOP = "    for (std::uint32_t i = 0; i < tiles(bytes, kTileBytes, channel); i++) {\n"
DONE = "    signal(&staging(p).done[rank][channel], epoch);\n"
PRODUCED = "    signal(&staging(p).produced[rank][channel], n + 1);\n"
CONSUMED = "    signal(&staging(p).consumed[rank][channel], n + 1);\n"
FROM_RING = "    copy(out(p) + tile.begin, staging(rank).rings[p][channel][n % kSlots], tile.bytes, t, kTeam);\n"
STORE_EPOCH = "  if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;\n"
OTHER_EPOCHS = "    for (std::uint32_t c = blocks + threadIdx.x; c < kEpochs; c += blockDim.x) epochs[c] = epoch;\n"
STOP = "    if (wait.broken) stop[team] = 1;\n"
TELL = "        if (r != place.rank) ptx::swap_if_zero_sys(&place.control(r)->failure, record);\n"
LAST_LOOK = "    last_look = ptx::load_relaxed_sys(&place.control(place.rank)->closed[peer]) != 0;\n"

MUTANTS = (
    # what is read has been published, and was seen to be
    mutant("relaxed_signal", "VISIBLE", RELEASE, VOLATILE, "direct", "staged"),
    mutant("no_acquire", "VISIBLE", "      ptx::load_acquire_sys(word);  //", "      //", "staged"),
    mutant("no_acquire_of_done", "VISIBLE", "    ptx::load_acquire_sys(word);\n  }", "  }", "direct"),
    mutant("signal_before_all_have_stored", "VISIBLE", BARRIER + RELEASE, RELEASE, "direct", "staged"),
    mutant("done_before_copy", "VISIBLE", DIRECT_LOOP, DONE + DIRECT_LOOP, "direct"),
    mutant("only_one_thread_waits", "VISIBLE", BARRIER + "    return !stop", "    return !stop", "staged"),
    mutant("use_before_header", "VISIBLE", STOP + BARRIER, STOP, "direct"),
    mutant("teams_share_outputs", "VISIBLE", "outputs[team / 2]", "outputs[0]", "direct"),
    mutant("last_packet_unchecked", "VISIBLE", EPOCHS, EPOCHS.replace(" || w[3].w != epoch", ""), "flags"),
    mutant("first_packet_unchecked", "VISIBLE", EPOCHS, EPOCHS.replace("w[0].w != epoch || ", ""), "flags"),
    mutant("older_packets_pass", "VISIBLE", EPOCHS, EPOCHS.replace("!= epoch", "== 0"), "flags"),
    mutant("header_half_checked", "VISIBLE", "(seen.request.x != epoch || seen.more.x", "(seen.more.x", "flags",
           file="signal.cuh"),
    mutant("epoch_0", "VISIBLE", "epoch + 1 ? epoch + 1 : 2", "epoch + 1", "flags", "direct", file="signal.cuh"),
    # what is overwritten has been read
    mutant("one_header", "REUSE", "control(to)->headers[rank][epoch % 2]", "control(to)->headers[rank][0]", "flags",
           file="signal.cuh"),
    mutant("one_slab_to_send", "REUSE", "uint4* slab = staging(p).slabs[rank][epoch % 2];",
           "uint4* slab = staging(p).slabs[rank][0];", "flags"),
    mutant("ring_overrun", "REUSE", "n + 1 - kSlots", "n - kSlots", "staged"),
    mutant("consumed_before_copy", "REUSE", FROM_RING + CONSUMED, CONSUMED + FROM_RING, "staged"),
    mutant("epoch_before_use", "REUSE", "  __syncthreads();\n" + STORE_EPOCH, STORE_EPOCH, "flags"),
    # everybody gets what he waits for
    mutant("epoch_of_block_0_only", "PROGRESS", STORE_EPOCH, STORE_EPOCH.replace("x == 0", "x + blockIdx.x == 0"), "flags"),
    mutant("epochs_of_idle_blocks", "PROGRESS", "  if (blockIdx.x == 0)\n" + OTHER_EPOCHS, "", "flags"),
    mutant("produced_too_late", "PROGRESS", PRODUCED, PRODUCED.replace("n + 1", "n"), "staged"),
    mutant("wait_for_whole_ring", "PROGRESS", "n + 1 - kSlots", "n + 1", "staged"),
    # a failure ends the call everywhere, names who is to blame, and harms nothing else
    mutant("stored_after_mismatch", "FAILURE", STOP + BARRIER + "    if (stop[team]) return;\n", STOP + BARRIER, "splits"),
    mutant("expected_unchecked", "FAILURE", " || expected != pair(p).send_bytes", "", "splits"),
    mutant("peers_are_not_told", "FAILURE", TELL, "        (void)r;\n", "splits", file="signal.cuh"),
    mutant("waiting_is_blamed", "FAILURE", "blame(peer)", "peer", "absent", file="signal.cuh"),
    mutant("host_is_not_told", "FAILURE", "    ptx::store_relaxed_sys(place.host, record);\n", "", "absent",
           file="signal.cuh"),
    mutant("own_record_first", "FAILURE", "note(was ? was : record)", "note(record)", "mismatch", file="signal.cuh"),
    mutant("refuser_blames_others", "FAILURE", "if (digest == kRefusal) return", "if (false) return", "refused",
           file="signal.cuh"),
    mutant("refusal_unnoticed", "FAILURE", "seen.request.y == kRefusal", "false", "refused", file="signal.cuh"),
    mutant("no_last_look", "FAILURE", "    if (last_look)\n", LAST_LOOK + "    if (last_look)\n", "leaving",
           file="signal.cuh"),
)  # fmt: skip

AWAITED = "    if (wait.broken) lost[1] = 1;\n"
MADE = "    if (!make_pair(a, p, pairs[p])) lost[0] = 1;\n"
SYNC = "    __syncthreads();\n"
RAGGED_MUTANTS = (
    mutant("places_before_all_have_waited", "VISIBLE", AWAITED + SYNC, AWAITED, "packets"),
    mutant("pairs_before_they_are_made", "VISIBLE", MADE + SYNC[2:], MADE, "packets"),
    mutant("end_unchecked", "FAILURE", "!lies_within(at, rows, a.out_rows)", "false", "behind_the_end"),
    mutant("own_rows_unchecked", "FAILURE", "!lies_within(from, send, a.in_rows) || ", "", "outside"),
)
