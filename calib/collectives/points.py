"""What a rank does for a point: `measure` returns the pieces that this rank has of the point's rows.

Every rank walks the same path; a rank that has no part in a piece returns it with no times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from calib.analytic import expected_s
from calib.collectives.beside import Lane, beside
from calib.collectives.operations import Collective, check
from calib.collectives.rank import Here, reason_of
from calib.collectives.shard import ShardStep, share_norms
from calib.collectives.timing import HOLD_S, Piece, calls_for, expected_collective_s, timed
from calib.collectives.transfers import Transfer
from calib.measure import Protocol
from calib.models import model_shape

Point = Mapping[str, Any]
TRANSFER_GB_S = 300.0
KV_BYTES = {"llama-3.1-70b-tp2": 36 << 30}
OTHER_KV_BYTES = 8 << 30
LAYERS = {"llama-3.1-8b": 8}  # weights of as many layers do beside a transfer; others have all of theirs
NODE_S = 0.4e-6  # host time to launch a node of a graph
MOST_HOLD_S = 0.02
LONG_REPLAY_S, MOST_CALLS = 1.5e-3, 250
LAUNCHES = ("eager", "graph")


def measure(here: Here, point: Point) -> list[Piece]:
    """The pieces of `point`, by its key `do`."""
    return DO[point["do"]](here, point)


def lab_of(here: Here, name: str) -> Any:
    """The rank's bench of a model, made when first asked for; on the CPU one that only has an arena."""
    if name not in here.labs:
        model, place = model_shape(name), here.place
        if place.cpu:
            from calib.collectives.fake import CpuLab

            lab: Any = CpuLab(model, place.protocol, place.seed + place.rank)
        else:
            from calib.collectives.bench import RankLab

            here.team.torch.cuda.empty_cache()
            kv = KV_BYTES.get(name, OTHER_KV_BYTES)
            seed = place.seed + place.rank
            lab = RankLab(model, place.protocol, seed, here.meter, LAYERS.get(name, 0), kv)
        if "-tp" in name:
            share_norms(here.team, lab.arena)
        here.labs[name] = lab
    return here.labs[name]


def collective(here: Here, point: Point) -> list[Piece]:
    """One collective at one size, checked, then as a graph and eagerly (or as `launches` says), on `sms` SMs."""
    team, protocol = here.team, here.place.protocol
    kind, size, limit = point["kind"], point["message_bytes"], point.get("max_ctas", 0)
    calls = calls_for(protocol, expected_collective_s(size))
    sms, pieces = point.get("sms", 0), []
    stream = lab_of(here, point["model"]).partition(sms).stream() if sms else None
    work = Collective(team, kind, size, calls, limit)
    with team.stage.on(stream):
        error = _checked(here, work)
    columns = {"kind": kind, "label": team.stage.backend, "message_bytes": size, "error": error}
    columns |= {"max_ctas": limit or None, "sms": sms or None}
    for launch in point.get("launches", LAUNCHES):
        pieces.append(
            _tried(columns, launch, lambda how: timed(team, work, how, protocol, here.meter, stream=stream))
        )
    return pieces


def _tried(columns: dict[str, Any], launch: str, call: Callable[[str], Piece]) -> Piece:
    """What `call` measures, or why it could not: a capture that is refused leaves the eager times standing."""
    try:
        found = call(launch)
    except Exception as error:  # whatever a library raises
        return Piece({**columns, "launch": launch, "skip": reason_of(error)}, [], launch)
    return Piece(columns, found.times_s, launch, found.host_s, found.readings)


def _checked(here: Here, work: Collective) -> float:
    """Run every call once on poisoned outputs and compare the last with what it must be."""
    team = here.team
    work.poison()
    work.refresh()
    for i in range(work.calls):
        work.run(i)
    team.stage.sync()
    worst = work.error()
    # every rank has to refuse alike, or the others would wait for ever
    worst = team.agree(worst if worst == worst else math.inf)[0]
    return check(worst, f"{work.kind} of {work.message_bytes} bytes")


def transfer(here: Here, point: Point) -> list[Piece]:
    """One KV transfer from rank 0 to rank 1."""
    team, protocol = here.team, here.place.protocol
    made, columns, _ = _transfer(here, point)
    error = team.agree(0.0 if made.error() == 0.0 else math.inf)[0]
    check(error, f"A {point['method']} of {point['message_bytes']} bytes")
    hold_s = min(MOST_HOLD_S, HOLD_S + NODE_S * made.pieces * made.layers * made.calls)
    pieces = []
    for launch in point.get("launches", LAUNCHES):
        found = Piece(columns, [], launch)
        if made.active:
            found = _tried(
                columns,
                launch,
                lambda how: timed(team, made, how, protocol, here.meter, made.together, None, hold_s),
            )
        team.agree(0.0)  # ranks without a part wait here
        pieces.append(found)
    return pieces


def _transfer(
    here: Here, point: Point, protocol: Protocol | None = None
) -> tuple[Transfer, dict[str, Any], float]:
    """(the transfer, its columns, seconds that a call should take)."""
    size, layers = point["message_bytes"], point.get("layers", 1)
    piece = point.get("piece_bytes", 0)
    pieces = size // piece if piece else 1
    expected = layers * (6e-6 + max(size / (TRANSFER_GB_S * 1e9), 1.2e-6 * pieces))
    calls = calls_for(protocol or here.place.protocol, expected)
    if pieces * layers * calls > 4096:  # a graph of very many nodes takes seconds to make
        calls = max(1, 4096 // (pieces * layers))
    made = Transfer(here.team, point["method"], point["layout"], size, piece, layers, calls)
    columns = {
        "kind": "kv_transfer",
        "label": f"{point['method']}/{point['layout']}",
        "message_bytes": size,
        "piece_bytes": piece or None,
        "layers": layers,
    }
    return made, columns, expected


def shard(here: Here, point: Point) -> list[Piece]:
    """Layers of a tensor-parallel shard or a whole step, with or without what joins the shards."""
    team, protocol = here.team, here.place.protocol
    lab = lab_of(here, point["model"])
    pieces = []
    for launch in point.get("launches", LAUNCHES):
        work = ShardStep(team, lab.model, point)
        with team.stage.on():
            work.prepare(lab.arena, 0, padded=launch == "graph")
        if not work.head:
            whole = expected_s(work, lab.facts, lab.facts.sms)
            work.calls = protocol.per_replay(whole, work.copies, 4)
        hold_s = HOLD_S + NODE_S * work.calls * work.launches
        shape = {"kind": work.kind, "label": work.label, **work.columns(), "sms": lab.facts.sms}
        shape |= {"flops": work.flops, "bytes": work.bytes}

        def call(how: str, work: ShardStep = work, hold_s: float = hold_s) -> Piece:
            return timed(team, work, how, protocol, here.meter, hold_s=hold_s)

        pieces.append(_tried(shape, launch, call))
    return pieces


def shard_error(here: Here, point: Point) -> list[Piece]:
    """One layer of a shard against float32, all-reduces included."""
    team = here.team
    lab = lab_of(here, point["model"])
    work = ShardStep(team, lab.model, point)
    with team.stage.on():
        work.prepare(lab.arena)
        error = work.reference_error()
        team.stage.sync()
    error = team.agree(error if error == error else math.inf)[0]
    if not error <= 2e-2:
        check(math.inf, f"A shard's {work.kind}")
    columns = {"kind": work.kind, "label": work.label, **work.columns(), "error": error}
    return [Piece({**columns, "sms": lab.facts.sms}, [], "eager")]


def operator(here: Here, point: Point) -> list[Piece]:
    """One operator of the shard alone, on rank 0's GPU (the others run it too, so that all are equally warm)."""
    from calib.kernels import make
    from calib.sweeps.common import solo_row

    lab = lab_of(here, point["model"])
    kernel = make(lab.model, {k: v for k, v in point.items() if k != "model"})
    sample = lab.time(kernel, lab.facts.sms, "graph")
    row = solo_row(kernel, lab.facts.sms, sample)
    columns = {k: v for k, v in row.items() if k not in sample.columns()}
    here.team.agree(0.0)
    times = sample.times_s if here.team.rank == 0 else []
    return [Piece(columns, times, "graph", None, sample.readings)]


def long_replays(protocol: Protocol) -> Protocol:
    """The protocol of what runs side by side: replays so long that the host, which launches both sides in turn, is
    never what either waits for."""
    return replace(protocol, replay_s=LONG_REPLAY_S, longest_graph=MOST_CALLS)


def side_by_side(here: Here, point: Point) -> list[Piece]:
    """Compute beside a collective or a transfer. `sms`: of the compute; the other side has the rest, or, where the
    point says `shared`, both have all SMs."""
    from calib.kernels import make

    team, protocol = here.team, long_replays(here.place.protocol)
    lab = lab_of(here, point["model"])
    total, sms = lab.facts.sms, point["sms"]
    shared = sms == total
    mine = lab.partition(sms)
    compute_stream = mine.stream() if not shared else lab.whole[0].stream()
    comm_stream = lab.whole[1].stream() if shared else lab.partition(total - sms, remainder=True).stream()
    computes = team.rank in point.get("compute_ranks", range(team.size))
    lanes: list[Lane | None] = [None, None]
    kernel = make(lab.model, point["compute"])
    if computes:
        with team.stage.on(compute_stream):
            lab.ready(kernel, sms, 0, padded=True)
            launches = protocol.per_replay(expected_s(kernel, lab.facts, sms), kernel.copies)
            graph = team.stage.capture(lambda: [kernel.run(i) for i in range(launches)])
        lanes[0] = Lane(graph, compute_stream, launches)
    other, columns, active = _other(here, point)
    if active:
        with team.stage.on(comm_stream):
            other.refresh()
            for i in range(min(2, other.calls)):
                other.run(i)
            team.stage.sync()
            graph = team.stage.capture(lambda: [other.run(i) for i in range(other.calls)])
        lanes[1] = Lane(graph, comm_stream, other.calls)
    readings = beside(team, lanes, protocol.corun_s, here.meter)
    mode = "streams" if shared else "disjoint"
    shape = {"kind": kernel.kind, "label": kernel.label, **kernel.columns(), "sms": sms}
    shape |= {"flops": kernel.flops, "bytes": kernel.bytes}
    comm_sms = total if shared else total - sms
    other_shape = {**columns, "gpus": team.size, "sms": comm_sms}
    rows = [(shape, other_shape, lanes[0]), (other_shape, shape, lanes[1])]
    return [_side(own, beside_it, mode, lane, readings) for own, beside_it, lane in rows]


def _side(
    own: Mapping[str, Any], other: Mapping[str, Any], mode: str, lane: Lane | None, readings: list[Any]
) -> Piece:
    from calib.rows import as_neighbour

    columns = {**own, **as_neighbour({**other, "mode": mode})}
    if lane is None:
        return Piece(columns, [])
    beside_s, alone = ([t / lane.launches for t in times] for times in (lane.beside_s, lane.alone_s))
    return Piece(columns, beside_s, "graph", None, readings, alone)


def _other(here: Here, point: Point) -> tuple[Any, dict[str, Any], bool]:
    """(what runs beside the compute, its columns, whether this rank has a part in it)."""
    if "method" in point:
        made, columns, _ = _transfer(here, point, long_replays(here.place.protocol))
        return made, columns, made.active
    size, limit = point["message_bytes"], point.get("max_ctas", 0)
    calls = calls_for(long_replays(here.place.protocol), expected_collective_s(size), MOST_CALLS)
    columns = {"kind": point["kind"], "label": here.team.stage.backend, "message_bytes": size}
    work = Collective(here.team, point["kind"], size, calls, limit, mean=True)
    return work, {**columns, "max_ctas": limit or None}, True


def kernels(here: Here, point: Point) -> list[Piece]:
    """Name, grid and block of NCCL's kernels, by one profiled run each: never in a process that times afterwards."""
    from calib.profiling import launched_by

    team = here.team
    found: list[Piece] = []
    works = [
        (kind, size, limit, Collective(team, kind, size, 1, limit))
        for kind in point["kinds"]
        for size in point["sizes"]
        for limit in point["limits"]
    ]
    with team.stage.on():
        for *_, work in works:
            work.refresh()
            work.run(0)
        team.stage.sync()
        seen = launched_by(team.torch, [lambda w=work: w.run(0) for *_, work in works])
    team.agree(0.0)
    for (kind, size, limit, _), started in zip(works, seen, strict=True):
        columns = {"kind": kind, "label": team.stage.backend, "message_bytes": size}
        for kernel in started:
            found.append(Piece({**columns, "max_ctas": limit or None, **kernel}, [], "eager"))
    return found


DO: dict[str, Callable[[Here, Point], list[Piece]]] = {
    "collective": collective,
    "transfer": transfer,
    "shard": shard,
    "shard_error": shard_error,
    "operator": operator,
    "beside": side_by_side,
    "kernels": kernels,
}
