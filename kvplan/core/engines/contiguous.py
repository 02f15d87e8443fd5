"""Engines that keep the KV of a sequence in one contiguous reservation: static batching and the three Orcas.

They differ in two functions: what a sequence reserves, and when one may join.

===============  ==============================================  ==================================
``static``       the longest sequence that is served             when the batch before it has ended
``orca-max``     the longest sequence that is served             at every step
``orca-pow2``    prompt and the next power of two of the output  at every step
``orca-oracle``  prompt and output, which it knows               at every step
===============  ==============================================  ==================================

Sources: Yu et al. 2022 (Orca: scheduling by iteration, slots reserved for the whole sequence), Kwon et al. 2023,
section 6.1 (the three reservations, placed by a buddy allocator). No code of Orca is public: these engines follow the
papers, not a program. The places of a static batch are all of one size, so a sum of slots serves there.

Rules: first come, first served; nobody behind the head is tried. Prompts are never split: all that join in a
step are computed in it, together at most ``max_num_batched_tokens``. A sequence of a static batch that is done keeps
its place and its slots until the longest is done. Nothing grows and nobody is preempted, so while only decodes run, a
run of steps is one turn. A turn costs O(joined + finished), each with O(log slots) for its piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from kvplan.core.buddy import BuddyAllocator, piece_size
from kvplan.core.cohort import Cohort, Member
from kvplan.core.engine import DecodeRun, Holding, Live, PoolPicture, Turn
from kvplan.core.request import Request
from kvplan.errors import DoesNotFit, InputError

Reservation = Literal["static", "orca-max", "orca-pow2", "orca-oracle"]
RESERVATIONS: tuple[Reservation, ...] = get_args(Reservation)


def reservation_of(engine: str) -> Reservation:
    """How the engine of this name reserves; it must be one of these."""
    return next(reservation for reservation in RESERVATIONS if reservation == engine)


@dataclass(frozen=True, slots=True)
class ContiguousConfig:
    """Settings, by vLLM's names where it has them. A block is one slot: the KV of a token in all layers."""

    block_size: ClassVar[int] = 1
    enable_prefix_caching: ClassVar[bool] = False

    reservation: Reservation
    num_gpu_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int

    @property
    def usable_blocks(self) -> int:
        """All slots: none is kept out."""
        return self.num_gpu_blocks

    @property
    def least_pool(self) -> int:
        """Slots with which the engine starts: a place for the longest sequence."""
        return self.max_model_len if self.reservation == "static" else piece_size(self.max_model_len)

    @property
    def largest_place(self) -> int:
        """Slots of the largest reservation that the pool ever holds."""
        return largest_place(self.reservation, self.num_gpu_blocks)

    def check(self) -> None:
        """Refuse a batch without room for the longest prompt, and a pool that cannot hold the longest sequence.

        Raises `InputError` for the one and `DoesNotFit` for the other.
        """
        if self.max_num_batched_tokens < self.max_model_len:
            raise InputError(
                f"engine {self.reservation} splits no prompt: max_num_batched_tokens {self.max_num_batched_tokens:,} "
                f"must reach max_model_len {self.max_model_len:,}",
                where="--max-num-batched-tokens",
                hint="raise it, or lower --max-model-len",
            )
        if self.max_model_len > self.largest_place:
            raise DoesNotFit(
                f"the engine would not start: one sequence of max_model_len {self.max_model_len:,} needs a contiguous "
                f"piece, and the largest in a pool of {self.num_gpu_blocks:,} slots is {self.largest_place:,}",
                where="--max-model-len",
                hint=f"at most --max-model-len {self.largest_place} fits"
                if self.largest_place
                else "give the pool more memory",
            )


def largest_place(reservation: Reservation, slots: int) -> int:
    """Slots of the largest reservation that a pool of ``slots`` ever holds: a buddy's pieces are powers of two."""
    return slots if reservation == "static" else 1 << slots.bit_length() >> 1


class Contiguous:
    """``add`` requests, then ``turn`` until ``is_idle``.

    ``watched`` visits every sequence in every step and names it in its `Turn`, for observers; decisions are the same.
    """

    def __init__(self, config: ContiguousConfig, *, watched: bool = False) -> None:
        self.config = config
        self._is_static = config.reservation == "static"
        self.cohort = Cohort(1)
        #: Places of the batch, in order of admission; in a static batch those who are done too.
        self.running: dict[Member, None] = {}
        self.waiting: deque[Member] = deque()
        self.memory: BuddyAllocator | _Places = (
            _Places(config.usable_blocks) if self._is_static else BuddyAllocator(config.usable_blocks)
        )
        self._starts: dict[Member, int] = {}
        self._is_watched = watched
        self._num_added = 0
        self._num_admitted = 0
        #: Tokens that those who are not done will have computed in the end.
        self._final_tokens = 0
        #: Whether nobody joins a static batch any more, until it has ended.
        self._is_closed = False
        #: Whether the head of the queue was tried in vain and nothing has changed since that could help it.
        self._head_is_blocked = False
        #: What those held who were freed in this step; watched only, for `picture`.
        self._left: list[Holding] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""
        return not self.running and not self.waiting

    @property
    def is_livelocked(self) -> bool:
        """Never: whoever runs finishes."""
        return False

    def why_stuck(self) -> str:
        """Nothing can be: see `refusal`."""
        return "whoever runs finishes, and who can never be admitted is turned away"

    def live(self) -> Iterator[Live]:
        """Of every request that is not done: id, tokens so far, prompt included, and those that have KV."""
        for member in (*self.running, *self.waiting):
            if member.decoding:
                yield member.id, member.base + self.cohort.step + 1, member.base + self.cohort.step
            elif member.num_tokens < member.max_tokens:
                yield member.id, member.num_tokens, member.computed

    def picture(self, turn: Turn[Member]) -> PoolPicture:
        """The pool after the scheduling of ``turn``, which is the turn taken last; watched engines only.

        Places of a static batch are shown in the order in which they were given.
        """
        assert self._is_watched, "who leaves is noted for watched engines only"
        return PoolPicture(1, 0, self.config.usable_blocks, [*self._left, *self._holdings(self.running)])

    def _holdings(self, members: Iterable[Member]) -> Iterator[Holding]:
        """The reservation of each, the k-th of all who have one; its tail may be more than was asked for."""
        order = {member: number for number, member in enumerate(self.running)}
        for member in members:
            start = self._starts[member]
            if isinstance(self.memory, BuddyAllocator):
                slots = range(start, start + self.memory.held(start))
            else:
                slots = range(order[member] * start, (order[member] + 1) * start)
            computed = member.base + self.cohort.step if member.decoding else member.computed
            yield Holding(member.id, slots, computed)

    # Arrival

    def refusal(self, request: Request) -> str | None:
        """Why a request is turned away, or None; what can never be reserved would block the queue for ever."""
        if reason := request.refusal(self.config.max_model_len):
            return reason
        if request.input_tokens > self.config.max_num_batched_tokens:
            return "prompt_exceeds_max_num_batched_tokens"
        slots = self.slots_to_reserve(Member(request, (0, 0), self.config.max_model_len))
        if slots > self.config.largest_place:
            return "reservation_exceeds_pool"
        return None

    def add(self, request: Request) -> None:
        """Queue a request; `refusal` must be None."""
        if not self.waiting:
            self._head_is_blocked = False
        self.waiting.append(Member(request, (0, self._num_added), self.config.max_model_len))
        self._num_added += 1

    # What the engines differ in

    def slots_to_reserve(self, member: Member) -> int:
        """Slots that a sequence must have before it joins."""
        reservation, longest = self.config.reservation, self.config.max_model_len
        if reservation in ("static", "orca-max"):
            return longest
        if reservation == "orca-oracle":
            return member.max_tokens
        prompt = member.request.input_tokens
        return min(prompt + piece_size(member.max_tokens - prompt), longest)

    def may_admit(self) -> bool:
        """Whether a sequence may join in this step, if there is room."""
        return len(self.running) < self.config.max_num_seqs and not self._is_closed

    # A turn

    def decode_shape(self) -> tuple[int, int] | None:
        """(sequences, context tokens) of the next step if nothing but decodes can be in it, else None."""
        if self._is_watched or not self.cohort.size or (self.waiting and not self._is_blocked()):
            return None
        return self.cohort.size, self.cohort.context

    def turn(self, max_steps: int = 1) -> Turn[Member] | DecodeRun[Member]:
        """Take one step or, while nobody can join, up to ``max_steps`` until somebody finishes."""
        if self.decode_shape() is None:
            return self._step()
        return self._decode(min(max_steps, self.cohort.first_finish - self.cohort.step + 1))

    def _is_blocked(self) -> bool:
        return self._head_is_blocked or not self.may_admit()

    def _decode(self, steps: int) -> DecodeRun[Member]:
        cohort = self.cohort
        context = cohort.context
        empty, reserved = self._slots(context)
        cohort.advance(steps, cohort.size * steps)
        run: DecodeRun[Member] = DecodeRun(
            steps=steps,
            decoders=cohort.size,
            context=context,
            takes=[0] * steps,
            free_blocks=self.memory.free_slots,
            cached_blocks=0,
            evicted=0,
            running=len(self.running),
            waiting=len(self.waiting),
            shared_blocks=0,
            empty_slots=empty,
            reserved_slots=reserved,
            waste_begun=(),
            finished=cohort.finished(),
            free_blocks_end=0,
            hole_slots=self._hole_slots(),
        )
        self._finish(run.finished)
        run.free_blocks_end = self.memory.free_slots
        return run

    def _step(self) -> Turn[Member]:
        """One step: all who decode take a token, and who may join does so with the whole prompt."""
        cohort = self.cohort
        turn: Turn[Member] = Turn()
        self._left = []
        decoding = [member for member in self.running if member.decoding] if self._is_watched else []
        self._admit_waiting(turn)
        work = turn.work
        work.decodes = work.sampled = turn.scheduled_tokens = cohort.size
        work.decode_context = cohort.context
        prompts = 0
        for member in turn.admitted:
            tokens = member.request.input_tokens
            turn.scheduled.append((member, tokens))
            turn.prefix_hits.append((member, 0))
            work.chunks.append((0, tokens))
            member.computed = tokens
            prompts += tokens
        work.sampled += len(turn.admitted)
        turn.scheduled_tokens += prompts
        turn.empty_slots, turn.reserved_slots = self._slots(cohort.context + prompts)
        turn.free_blocks, turn.hole_slots = self.memory.free_slots, self._hole_slots()
        turn.running, turn.waiting = len(self.running), len(self.waiting)
        turn.decoders = cohort.size
        self._settle(turn)
        if self._is_watched:
            turn.decoders = 0
            turn.scheduled[:0] = [(member, 1) for member in decoding]
            turn.sampled[:0] = decoding
            turn.started_decoding = []
        return turn

    def _admit_waiting(self, turn: Turn[Member]) -> None:
        """Let the head of the queue join until it may not, its slots are not there, or the step is full."""
        budget = self.config.max_num_batched_tokens
        while self.waiting and self.may_admit():
            member = self.waiting[0]
            if member.request.input_tokens > budget:
                return  # the next step goes on with it
            start = self.memory.allocate(self.slots_to_reserve(member))
            if start is None:
                self._head_is_blocked = True
                break
            budget -= member.request.input_tokens
            self.waiting.popleft()
            self._starts[member] = start
            member.serial = self._num_admitted
            self._num_admitted += 1
            self._final_tokens += member.final_tokens
            self.running[member] = None
            turn.admitted.append(member)
        if self._is_static and self.running:
            self._is_closed = True

    def _settle(self, turn: Turn[Member]) -> None:
        """Sampled tokens; who goes on decodes, who stops is freed."""
        cohort = self.cohort
        cohort.advance(1, cohort.size)
        done = cohort.finished()
        for member in turn.admitted:
            member.num_tokens += 1
            turn.sampled.append(member)
            if member.num_tokens >= member.max_tokens:
                done.append(member)
            else:
                cohort.join(member)
                turn.started_decoding.append(member)
        turn.finished = done
        self._finish(done)
        turn.free_blocks_end = self.memory.free_slots

    def _finish(self, done: Iterable[Member]) -> None:
        """Take out who is done; slots are freed at once, or with the batch where it is static."""
        for member in done:
            if member.decoding:
                self.cohort.leave(member)
            self._final_tokens -= member.final_tokens
        if self._is_static:
            done = list(self.running) if not self.cohort.size else []
            self._is_closed = self.cohort.size > 0 and self._is_closed
        if self._is_watched:
            self._left = list(self._holdings(done))
        for member in done:
            del self.running[member]
            self.memory.release(self._starts.pop(member))
            self._head_is_blocked = False

    # Slots

    def _slots(self, computed: int) -> tuple[int, int]:
        """Slots held without KV that is still needed, and those of them that their owners will fill."""
        return self.config.usable_blocks - self.memory.free_slots - computed, self._final_tokens - computed

    def _hole_slots(self) -> int:
        """Free slots, at a moment when the head needs no more than these and no piece holds it."""
        return self.memory.lost_to_holes(self.slots_to_reserve(self.waiting[0])) if self.waiting else 0


class _Places:
    """Places of ``max_model_len`` slots each: a sum, as all are equal. The face is the buddy allocator's."""

    def __init__(self, slots: int) -> None:
        self.free_slots = slots

    def allocate(self, slots: int) -> int | None:
        """Take a place of so many slots and return its size; None if it is not free."""
        if slots > self.free_slots:
            return None
        self.free_slots -= slots
        return slots

    def release(self, slots: int) -> None:
        """Give a place back."""
        self.free_slots += slots

    def lost_to_holes(self, slots: int) -> int:
        """None: equal places leave no hole between them."""
        return 0
