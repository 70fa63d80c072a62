"""What a rank does that only runs an engine: it obeys trainer rank 0, one command after another, until it is told to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid
from rlhf_mc.pipeline.control import COMMANDER, Command, ComputeLogprobs, Control, Generate, Progress, Ready, Sending, Stop, TakeWeights
from rlhf_mc.pipeline.engine import Engine
from rlhf_mc.pipeline.generation import Decoding

if TYPE_CHECKING:
    from rlhf_mc.tracking import StageClock, Trace


class EngineServer:
    """One rank of a separate engine. grid: the engines' ranks.  reshard: the way of the weights, on the job's ranks.

    clock: has each command as a stage.  trace: gets the engine's steps; an iteration of it begins with each sync.
    """

    def __init__(
        self, engine: Engine, grid: RolloutGrid, reshard: Reshard, control: Control, clock: StageClock, trace: Trace
    ) -> None:
        self._engine, self._grid, self._reshard, self._control, self._clock, self._trace = engine, grid, reshard, control, clock, trace

    def serve(self) -> None:
        """Says that the engine is ready, then obeys until the command to stop.

        An error ends it: half an obeyed command leaves nothing to go on with.
        """
        self._answer(Ready()).wait()
        while not isinstance(command := self._control.receive(COMMANDER), Stop):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, TakeWeights):
            self._trace.begin_iteration()
            with self._clock.stage("take weights"), self._engine.weight_update(command.version) as update:
                self._reshard.run({}, update)
        elif isinstance(command, ComputeLogprobs):
            with self._clock.stage("log-probs"):
                self._answer(self._engine.logprobs(command.token_ids, version=command.version)).wait()
        elif isinstance(command, Generate):
            with self._clock.stage("generate"):
                self._generate(command)
        else:
            raise TypeError(f"no command: {command!r}")

    def _generate(self, command: Generate) -> None:
        """Collective over the replica's ranks. An answer travels while the engine makes its next steps."""
        decoding = Decoding(self._engine, command.requests, command.version, command.greedy, command.schedule, self._trace)
        sending = Sending((), (), ())
        while not decoding.done:
            finished = decoding.advance(command.steps)
            self._clock.progress()
            if finished and self._speaks:
                sending.wait()
                sending = self._answer(Progress(finished))
        if self._speaks:
            sending.wait()
            self._answer(Progress({}, decoding.load())).wait()

    @property
    def _speaks(self) -> bool:
        return self._grid.tensor_rank == 0

    def _answer(self, message: object) -> Sending:
        return self._control.start({COMMANDER: message})
