"""An exhaustive search over all interleavings of the stages' steps, for small jobs.

It shares no code with `envpipe_megatron.core.channel_model`, which it checks.
"""

from envpipe_megatron.core.channel_model import inputs_of
from envpipe_megatron.core.kinds import MESSAGES, WHOLE, Kind, Unit
from envpipe_megatron.core.schedule import Schedule


def stopping_points(
    schedule: Schedule, capacity: int | None, max_states: int = 1_000_000
) -> frozenset[tuple[int, ...]]:
    """Every state that some interleaving ends in, as units wholly finished on each stage.

    It models the library one level lower: receives are posted, a transfer of a matched message is
    a step of its own, and a stage waits behind a send for *transfers*. Capacity 0 posts a receive
    when the stage stands at it and lets no send go untransferred; `k` and None post one ahead, and
    `k` lets `k - 1` sends go untransferred.

    Raises:
        AssertionError: more than `max_states` global states.
    """
    programs = _programs(schedule, capacity)
    channels = sorted({c for program in programs for _, c in program if c is not None})
    index = {channel: len(programs) + i for i, channel in enumerate(channels)}
    sent = {c: _counts(programs[c[1]], ("start", c)) for c in channels}
    taken = {c: _counts(programs[c[2]], ("take", c)) for c in channels}
    finished = [_counts(program, ("end", None)) for program in programs]
    may_wait = max(0, (capacity or 0) - 1)

    def next_states(state: _State) -> list[_State]:
        follow = []
        for stage, program in enumerate(programs):
            place = state[stage]
            if place == len(program):
                continue
            action, channel = program[place]
            possible = True
            if channel is not None and action == "take":
                possible = state[index[channel]] > taken[channel][place]
            elif channel is not None and action == "wait":
                possible = sent[channel][place] - state[index[channel]] <= may_wait
            if possible:
                follow.append(_plus_one(state, stage))
        for channel in channels:
            _, source, target = channel
            place = state[target]
            at_receive = programs[target][place : place + 1] == [("take", channel)]
            posted = taken[channel][place] + (at_receive if capacity == 0 else 1)
            if state[index[channel]] < min(posted, sent[channel][state[source]]):
                follow.append(_plus_one(state, index[channel]))
        return follow

    # A state is each stage's place in its program, then the messages transferred on each channel.
    start = (0,) * (len(programs) + len(channels))
    seen, frontier, points = {start}, [start], set()
    while frontier:
        state = frontier.pop()
        follow = next_states(state)
        if not follow:
            points.add(tuple(done[at] for done, at in zip(finished, state, strict=False)))
        frontier.extend(new for new in follow if new not in seen)
        seen.update(follow)
        if len(seen) > max_states:
            raise AssertionError(f"more than {max_states} states of '{schedule.name}'")
    return frozenset(points)


_State = tuple[int, ...]
_Channel = tuple[Kind, int, int]  # kind, sending stage, receiving stage
_Name = tuple[int, int]  # microbatch and chunk of the unit that takes it
_Step = tuple[str, _Channel | None]


def _programs(schedule: Schedule, capacity: int | None) -> list[list[_Step]]:
    """Each stage's steps: take, start a send, wait until it may go on, end a unit.

    What was sent before a message is taken before it, and a unit whose message was takes none.
    """
    stages = range(schedule.num_stages)
    routes = [
        [_routes(schedule, stage, unit) for unit in schedule.stages[stage]] for stage in stages
    ]
    sent: dict[_Channel, list[_Name]] = {}
    for stage in stages:
        for _, output in routes[stage]:
            if output is not None:
                sent.setdefault(output[0], []).append(output[1])
    programs = []
    for stage in stages:
        steps: list[_Step] = []
        leaves: _Channel | None = None
        for unit, (comes, goes) in zip(schedule.stages[stage], routes[stage], strict=True):
            if comes is not None:
                taken, channel = steps.count(("take", comes[0])), comes[0]
                steps += [("take", channel)] * (sent[channel].index(comes[1]) + 1 - taken)
            leaves = goes[0] if goes is not None else leaves
            if leaves is not None and not unit.combined:  # else with the next one's
                steps.append(("start", leaves))
                if capacity is not None:
                    steps.append(("wait", leaves))
                leaves = None
            steps.append(("end", None))
        programs.append(steps)
    return programs


def _routes(
    schedule: Schedule, stage: int, unit: Unit
) -> tuple[tuple[_Channel, _Name] | None, tuple[_Channel, _Name] | None]:
    """The channels of a unit's input and output, and how that message is called there."""
    last = schedule.num_stages - 1
    before, after = (stage - 1) % (last + 1), (stage + 1) % (last + 1)
    kind = Kind.FORWARD if unit.kind is Kind.FORWARD else Kind.BACKWARD
    front = None if stage == 0 and unit.chunk == 0 else before
    back = None if stage == last and unit.chunk == schedule.num_chunks - 1 else after
    source, target = (front, back) if kind is Kind.FORWARD else (back, front)
    if unit.kind is Kind.WEIGHT_GRADIENT:
        return None, None
    wraps = stage == (last if kind is Kind.FORWARD else 0)
    chunk = unit.chunk + wraps * (1 if kind is Kind.FORWARD else -1)
    comes = source not in (None, stage) and ((kind, source, stage), (unit.microbatch, unit.chunk))
    goes = target not in (None, stage) and ((kind, stage, target), (unit.microbatch, chunk))
    return comes or None, goes or None


def _counts(program: list[_Step], counted: _Step) -> list[int]:
    """How often a step was made, by place in the program."""
    done = [0]
    for step in program:
        done.append(done[-1] + (step == counted))
    return done


def _plus_one(state: _State, place: int) -> _State:
    return (*state[:place], state[place] + 1, *state[place + 1 :])


def out_of_turn(schedule: Schedule) -> bool:
    """Return True if a stage takes messages of a kind in another order than they are sent."""
    for stage, units in enumerate(schedule.stages):
        sent = inputs_of(schedule, stage)
        taken = [unit for unit in units if unit in sent]
        for kind in WHOLE:
            if [u for u in sent if MESSAGES[u.kind] is kind] != [
                u for u in taken if MESSAGES[u.kind] is kind
            ]:
                return True
    return False
