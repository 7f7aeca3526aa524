"""Times of the trainer: an optimiser step beside TRL's, and cycles with and without publishing."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.size_memory import random_batch
from echo_node.models import embedded
from echo_node.models.adapter import AdapterSettings
from echo_node.runs.algorithm import GrpoSettings, StepSettings, layout_for
from echo_node.trainer.grpo import advantages
from echo_node.trainer.step import TrainingGroup, TrainStep
from echo_node.weights.open_store import read_folder
from echo_node.weights.publisher import Publisher
from echo_node.weights.store import WeightsStore
from echo_node.weights.tensors import layout_of, root_of
from protocol import Identity, Roster, Rules, blob_id, encode

if TYPE_CHECKING:
    from echo_node.weights.publisher import SignedVersion

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Sequences of a micro-batch of TRL's that are tried."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, medians over interleaved pairs; TRL's at its best micro-batch."""

    ours: float
    trl: float
    ratio: float
    micro_batch: int
    pairs: int


class TrlStep:
    """TRL's loss, backward pass, clipping and AdamW, on the same batch."""

    def __init__(
        self,
        folder: Path,
        batch: Sequence[TrainingGroup],
        place: str,
        adapter: AdapterSettings | None = None,
    ) -> None:
        """Take over a model's folder; with `adapter`, PEFT trains one on the frozen model."""
        from datasets import Dataset  # type: ignore[import-untyped] # noqa: PLC0415 - with trl, an extra
        from trl.trainer.grpo_config import GRPOConfig  # noqa: PLC0415
        from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: PLC0415

        size, completion = len(batch[0].ids), len(batch[0].ids[0])
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        config = GRPOConfig(
            output_dir=place,
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=size,
            num_generations=size,
            max_completion_length=completion,
            beta=0.0,
            entropy_coef=GrpoSettings().entropy,
            loss_type="dapo",
            gradient_checkpointing=False,
        )
        self._trainer: Any = GRPOTrainer(
            model=self._model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["r12345="] * size}),
            processing_class=AutoTokenizer.from_pretrained(embedded.folder()),
            **({} if adapter is None else {"peft_config": _peft_config(adapter)}),
        )
        self._model = self._trainer.model  # with PEFT's layers in it
        self._model.train()
        self._trained = [each for each in self._model.parameters() if each.requires_grad]
        self._optimiser = torch.optim.AdamW(self._trained, lr=1e-6, weight_decay=0.0, fused=True)
        rows = [(group, place) for group in batch for place in range(size)]
        prompts = np.stack([np.asarray(group.prompt_ids) for group, _ in rows])
        answers = np.stack([group.ids[place] for group, place in rows])
        weights = [each for group in batch for each in advantages(group.rewards, "mean")]
        self._inputs = {
            "prompt_ids": torch.from_numpy(prompts),
            "prompt_mask": torch.ones(prompts.shape, dtype=torch.long),
            "completion_ids": torch.from_numpy(answers),
            "completion_mask": torch.ones(answers.shape, dtype=torch.long),
            "advantages": torch.tensor(weights, dtype=torch.float32),
            "old_per_token_logps": torch.from_numpy(
                np.stack([group.mu[place] for group, place in rows])
            ).float(),
        }
        self.sequences, self._tokens = len(rows), torch.tensor(answers.size)

    def backward(self, sequences: int, first: int = 0) -> None:
        """Add up the gradient of one micro-batch."""
        cut = {name: values[first : first + sequences] for name, values in self._inputs.items()}
        self._trainer.current_gradient_accumulation_steps = self.sequences // sequences
        self._trainer._compute_loss(self._model, {**cut, "num_items_in_batch": self._tokens}).backward()  # noqa: SLF001

    def step(self, sequences: int) -> None:
        """Take one optimiser step, in micro-batches."""
        for first in range(0, self.sequences, sequences):
            self.backward(sequences, first)
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()

    def best_micro_batch(self) -> int:
        """Return the micro-batch that takes the least time a sequence, over two tries of each."""
        times = {}
        for sequences in (each for each in MICRO_BATCHES if each <= self.sequences):
            times[sequences] = min(_seconds(lambda: self.backward(sequences)) for _ in range(2)) / sequences  # noqa: B023
        self._optimiser.zero_grad()
        return min(times, key=lambda sequences: times[sequences])


def step_times(
    folder: Path, vocabulary: int, parameters: int, *, groups: int, size: int, tokens: int, pairs: int
) -> StepTimes:
    """Time steps of both sides in turn, on `groups` × `size` completions as long as a prompt."""
    batch = random_batch(vocabulary, groups, size, tokens, tokens)
    settings = StepSettings(learning_rate=1e-6, **layout_for(parameters))
    ours = TrainStep(folder, settings, threads=torch.get_num_threads(), device="cpu")
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others' packages
        return timed_pairs(ours, TrlStep(folder, batch, place), batch, pairs)


def timed_pairs(ours: TrainStep, theirs: TrlStep, batch: Sequence[TrainingGroup], pairs: int) -> StepTimes:
    """Time steps of both sides in turn, TRL's at its best micro-batch."""
    best = theirs.best_micro_batch()
    found = []
    for turn in range(pairs):
        sides = (lambda: ours.step(batch), lambda: theirs.step(best))
        order = (0, 1) if turn % 2 else (1, 0)
        seconds = {side: _seconds(sides[side]) for side in order}
        found.append((seconds[0], seconds[1]))
    ratio = statistics.median(mine / other for mine, other in found)
    mine, other = (statistics.median(side) for side in zip(*found, strict=True))
    return StepTimes(mine, other, ratio, best, pairs)


def _peft_config(adapter: AdapterSettings) -> Any:
    from peft import LoraConfig  # noqa: PLC0415 - with trl, an extra

    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type] # a float is taken as it is
        lora_dropout=0.0,
        target_modules=list(adapter.targets),
        task_type="CAUSAL_LM",
    )


@dataclass(frozen=True, slots=True)
class PublishTimes:
    """Seconds of a cycle, medians; stalls are over the cycle without publishing, minus 1."""

    alone: float
    beside: float
    sequential: float

    @property
    def stall(self) -> float:
        return self.beside / self.alone - 1

    @property
    def sequential_stall(self) -> float:
        return self.sequential / self.alone - 1


class Cycles:
    """A model in training and the trainer's own publisher, in the order of the trainer's loop."""

    def __init__(self, step: TrainStep, publisher: Publisher, batch: Sequence[TrainingGroup]) -> None:
        self._step, self._publisher, self._batch = step, publisher, batch

    def alone(self, cycles: int) -> float:
        """Return the seconds of a cycle without publishing."""

        def work() -> None:
            for _ in range(cycles):
                self._step.accumulate(self._batch)
                self._step.update()

        return _seconds(work) / cycles

    def beside(self, cycles: int) -> float:
        """Return the seconds of a cycle whose head is published beside the next gradient."""

        def work() -> None:
            with ThreadPoolExecutor(1) as pool:
                under_way: Future[None] | None = None
                for _ in range(cycles):
                    self._step.accumulate(self._batch)
                    if under_way is not None:
                        under_way.result()  # the weights are read until then
                    self._step.update()
                    under_way = pool.submit(self.publish)

        return _seconds(work) / cycles

    def sequential(self, cycles: int) -> float:
        """Return the seconds of a cycle that goes on once its head is signed."""

        def work() -> None:
            with ThreadPoolExecutor(1) as pool:
                under_way: Future[None] | None = None
                for _ in range(cycles):
                    self._step.accumulate(self._batch)
                    if under_way is not None:
                        under_way.result()
                    self._step.update()
                    under_way = pool.submit(self._publisher.activate, self._sign())

        return _seconds(work) / cycles

    def publish(self) -> None:
        self._publisher.activate(self._sign())

    def _sign(self) -> SignedVersion:
        state = self._step.published_state()
        return self._publisher.sign(state, step=self._step.version, roster=Roster(()), groups=())


def publish_times(
    folder: Path, vocabulary: int, parameters: int, *, tokens: int, pairs: int, cycles: int = 3
) -> PublishTimes:
    """Time cycles in turn: without publishing, beside it, and one that waits for its head."""
    settings = StepSettings(learning_rate=1e-6, **layout_for(parameters))
    step = TrainStep(folder, settings, threads=torch.get_num_threads(), device="cpu")
    batch = random_batch(vocabulary, 2, 2, tokens // 8, tokens // 8)
    first = read_folder(folder)
    leader, layout = Identity.generate(), layout_of(first)
    rules = Rules(bytes(32), blob_id(encode(layout)), root_of(first), (leader.public,), (leader.public,))
    del first
    with (
        tempfile.TemporaryDirectory() as place,
        WeightsStore.open(Path(place, "store"), rules, layout) as store,
    ):
        turns = Cycles(step, Publisher(store, leader, luck=lambda: secrets.token_bytes(32)), batch)
        turns.publish()
        turns.sequential(1)  # both moments exist, and the first delta is written
        found = [(turns.alone(cycles), turns.beside(cycles), turns.sequential(cycles)) for _ in range(pairs)]
    alone, beside, sequential = (statistics.median(side) for side in zip(*found, strict=True))
    return PublishTimes(alone, beside, sequential)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
