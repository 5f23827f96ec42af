"""A small model of everything around the scheduler's core: agents, trainers, trajectory log, weight
store, task sources and the links between them.

Links are first in, first out per peer; a cut loses what is under way in both directions; a message
may be delivered twice. Peers behave like the real ones: standing things are repeated, spools and
checkpoints survive a crash of their owner. The model keeps its own version tree and its own record
of what each lineage was trained on, and raises where the core breaks a promise to it.
"""

from core_builders import (
    make_agent_hello,
    make_ref,
    make_summary,
    make_trainer_hello,
)
from core_world_links import Agent, Broken, Held, LinkedWorld, Trainer

from scheduler.core.settings import TRAJECTORY_LOG, WEIGHT_STORE
from transport.ids import policy_name
from transport.messages import (
    AttemptFailed,
    BatchGrant,
    BatchRequest,
    CheckpointReport,
    DrainOrder,
    Goodbye,
    GroupUnusable,
    Heartbeat,
    HeartbeatReply,
    HeldAttempt,
    HelloRequired,
    HostedPolicies,
    LeaseOffer,
    LeaseRecall,
    LeaseReply,
    LeaseRevoke,
    Message,
    Ping,
    RunState,
    StepReport,
    VersionServing,
    Welcome,
)
from transport.runs import DataSpec


class World(LinkedWorld):
    """Every verb is one thing that can happen."""

    # ---- agents ----------------------------------------------------------------------------------

    def agent_beats(self, name: str) -> None:
        agent = self.agents[name]
        if not agent.alive:
            return
        held = tuple(
            HeldAttempt(
                attempt=id,
                fence=h.offer.fence,
                spooled=h.summary is not None,
                started=bool(h.first),
            )
            for id, h in agent.held.items()
        )
        if not agent.welcome:
            hello = make_agent_hello(
                agent.incarnation, slots=3, held=held, versions=dict(agent.versions)
            )
            self._say(name, hello)
            return
        versions = {policy: make_ref(policy, v) for policy, v in agent.versions.items()}
        beat = Heartbeat(
            sequence=1, sent_s=0.0, held=held, versions=versions, draining=agent.draining
        )
        self._say(name, beat)
        if agent.draining and not held:
            self._say(name, Goodbye(reason="drained"))
            agent.alive = agent.draining = False

    def agent_updates(self, name: str, policy: str) -> bool:
        """The agent fetches a newer version, unless pinned work keeps it back."""
        agent = self.agents[name]
        newest = self.durable.get(policy, -1)
        pins = [h.offer.pinned[policy] for h in agent.held.values() if policy in h.offer.pinned]
        target = min([newest, *pins])
        if (
            not agent.alive
            or policy not in agent.hosted
            or agent.versions.get(policy, -1) >= target
        ):
            return False
        agent.versions[policy] = target
        digest = make_ref(policy, target).digest
        self._say(name, VersionServing(policy=policy, version=target, digest=digest, pause_s=0.0))
        return True

    def agent_starts(self, name: str, at: int) -> bool:
        """Draw the first token of a held attempt."""
        found = self._running(name, at)
        if found is None or found.first:
            return False
        versions = self.agents[name].versions
        if any(versions.get(p) != v for p, v in found.offer.pinned.items()):
            return False
        found.first = self.first_versions(found.offer, versions)
        return True

    def agent_finishes(self, name: str, at: int) -> bool:
        found = self._running(name, at)
        if found is None or not found.first:
            return False
        now = self.agents[name].versions
        spans = {policy: (first, max(first, now[policy])) for policy, first in found.first.items()}
        found.summary = make_summary(
            found.offer, name, versions=spans, **self._rewards(found.offer)
        )
        return True

    def _rewards(self, offer: LeaseOffer) -> dict[str, tuple[float, ...]]:
        """Something for data functions to tell apart, where the run has any."""
        if all(policy.data == DataSpec() for policy in self.spec.policies.values()):
            return {}
        sequences = len(offer.items) * offer.group_size
        return {"rewards": tuple(float(self.rng.random() < 0.5) for _ in range(sequences))}

    def agent_fails(self, name: str, at: int) -> bool:
        found = self._running(name, at)
        if found is None:
            return False
        offer = found.offer
        del self.agents[name].held[offer.attempt]
        self._say(name, AttemptFailed(attempt=offer.attempt, fence=offer.fence, code="engine"))
        return True

    def agent_uploads(self, name: str) -> bool:
        """A spooled body reaches the log, is acknowledged and leaves the spool."""
        agent = self.agents[name]
        done = [h for h in agent.held.values() if h.summary is not None]
        if not agent.alive or not done or done[0].summary is None:
            return False
        summary = done[0].summary
        self.bodies[summary.digest] = summary
        self.unaccepted[summary.digest] = summary
        del agent.held[summary.attempt]
        return True

    def agent_dies(self, name: str) -> None:
        self.cut(name)
        agent = self.agents[name]
        agent.alive = agent.draining = False
        agent.held = {id: h for id, h in agent.held.items() if h.summary is not None}

    def agent_returns(self, name: str) -> None:
        agent = self.agents[name]
        if not agent.alive:
            agent.alive = True
            agent.incarnation += 1

    def _running(self, name: str, at: int) -> Held | None:
        agent = self.agents[name]
        running = [h for h in agent.held.values() if h.summary is None]
        return running[at % len(running)] if agent.alive and running else None

    def _agent_hears(self, agent: Agent, message: Message) -> None:
        match message:
            case Welcome(policies=policies) | HostedPolicies(policies=policies):
                agent.welcome = True
                agent.hosted = policies
                agent.versions = {p: v for p, v in agent.versions.items() if p in policies}
            case HelloRequired():
                agent.welcome = False
            case DrainOrder():
                agent.draining = True
            case LeaseOffer():
                self._offered(agent, message)
            case LeaseRevoke(attempt=id):
                agent.held.pop(id, None)
            case LeaseRecall():
                self._recalled(agent, message)
            case HeartbeatReply(unknown=unknown):
                for id in unknown:
                    agent.held.pop(id, None)

    def _recalled(self, agent: Agent, recall: LeaseRecall) -> None:
        held = agent.held.get(recall.attempt)
        if held is None or held.offer.fence != recall.fence:
            return
        begun = bool(held.first) or held.summary is not None
        if not begun:
            del agent.held[recall.attempt]
        reply = LeaseReply(
            attempt=recall.attempt,
            fence=recall.fence,
            accepted=begun,
            reason="" if begun else "recalled",
        )
        self._say(agent.name, reply)

    def _offered(self, agent: Agent, offer: LeaseOffer) -> None:
        reason = ""
        if any(agent.versions.get(p, -1) > v for p, v in offer.pinned.items()):
            reason = "version_passed"
        elif agent.draining:
            reason = "draining"
        elif self.rng.random() < 0.1:
            reason = "full"
        elif any(policy not in agent.versions for policy in offer.policies.values()):
            reason = "policy_unknown"
        if not reason:
            agent.held[offer.attempt] = Held(offer)
        reply = LeaseReply(
            attempt=offer.attempt, fence=offer.fence, accepted=not reason, reason=reason
        )
        self._say(agent.name, reply)

    # ---- trainers ----------------------------------------------------------------------------

    def trainer_speaks(self, name: str) -> None:
        """Hello, or everything that stands: reports, the request or the final report."""
        trainer = self.trainers[name]
        if not trainer.alive or trainer.over:
            return
        spec = self.spec.policies[policy_name(trainer.policy)]
        if not trainer.welcome:
            step, version, _ = trainer.checkpoint
            hello = make_trainer_hello(
                trainer.policy, trainer.incarnation, step=step, version=version
            )
            self._say(name, hello)
            return
        self._say(name, Ping(sequence=1, sent_s=0.0))
        for report in trainer.reports:
            self._say(name, report)
        if trainer.stopping or trainer.step >= spec.steps:
            self.trainer_checkpoints(name)
            trainer.final = True
            report = CheckpointReport(
                policy=trainer.policy, step=trainer.step, version=trainer.head, final=True
            )
            self._say(name, report)
        elif not trainer.grant:
            request = BatchRequest(
                policy=trainer.policy,
                step=trainer.step + 1,
                groups=spec.batch_groups,
                head_version=trainer.head,
            )
            self._say(name, request)

    def trainer_steps(self, name: str) -> bool:
        trainer = self.trainers[name]
        if not trainer.alive or not trainer.grant:
            return False
        jobs = tuple(ref.job for ref in trainer.grant if not ref.replay)
        before = [job for _, done in trainer.lineage for job in done]
        if len(set(before + list(jobs))) != len(before) + len(jobs):
            raise Broken(f"{jobs} trained on twice by {name}: {before}")
        for ref in trainer.grant:
            if ref.replay:
                self._train_again(trainer, ref.job, before)
        self._check_bodies(trainer)
        trainer.grant = ()
        trainer.step += 1
        trainer.highest += 1
        parent, trainer.head = trainer.head, trainer.highest
        trainer.lineage.append((trainer.step, jobs))
        self._publish(trainer.policy, trainer.head, parent, trainer.step)
        report = StepReport(
            policy=trainer.policy,
            step=trainer.step,
            version=trainer.head,
            busy_s=1.0,
            waiting_s=0.0,
        )
        trainer.reports.append(report)
        self._say(name, report)
        self._say_checkpoint(trainer)
        return True

    def _train_again(self, trainer: Trainer, job: str, before: list[str]) -> None:
        trainer.again.append((trainer.step + 1, job))
        replay = self.spec.policies[policy_name(trainer.policy)].data.replay
        uses = sum(used == job for _, used in trainer.again)
        if job not in before or uses > replay.max_uses:
            raise Broken(f"{job} trained on again {uses} times by {trainer.name}: {before}")

    def trainer_checkpoints(self, name: str) -> bool:
        trainer = self.trainers[name]
        if not trainer.alive or trainer.checkpoint[0] == trainer.step:
            return False
        trainer.checkpoint = (trainer.step, trainer.head, len(trainer.lineage))
        trainer.unsaid = CheckpointReport(
            policy=trainer.policy, step=trainer.step, version=trainer.head
        )
        if trainer.step % 2:
            self._say_checkpoint(trainer)
        return True

    def _say_checkpoint(self, trainer: Trainer) -> None:
        """Some checkpoints are reported only after the next step."""
        if trainer.unsaid is not None:
            self._say(trainer.name, trainer.unsaid)
            trainer.unsaid = None

    def trainer_crashes(self, name: str) -> None:
        """It is back at once, at its checkpoint."""
        self.cut(name)
        trainer = self.trainers[name]
        trainer.incarnation += 1
        trainer.step, trainer.head, length = trainer.checkpoint
        del trainer.lineage[length:]
        trainer.again = [used for used in trainer.again if used[0] <= trainer.step]
        trainer.grant = ()
        trainer.unsaid = None
        trainer.reborn = True
        trainer.reports = []

    def trainer_refuses(self, name: str, at: int) -> bool:
        """One body of the grant is of no use."""
        trainer = self.trainers[name]
        if not trainer.alive or not trainer.grant or not self.republish:
            return False  # without, a rejected group may be the last one that a rollback can use
        ref = trainer.grant[at % len(trainer.grant)]
        trainer.grant = ()
        self._say(
            name,
            GroupUnusable(
                policy=trainer.policy, step=trainer.step + 1, job=ref.job, code="body.missing"
            ),
        )
        return True

    def _trainer_hears(self, trainer: Trainer, message: Message) -> None:
        match message:
            case Welcome(highest_version=highest, stopping=stopping):
                trainer.welcome = True
                trainer.highest = max(trainer.highest, highest)
                trainer.stopping = trainer.stopping or stopping
                if self.republish and trainer.reborn and trainer.highest > trainer.head:
                    # Agents are on versions that were left; this leads them back.
                    trainer.highest += 1
                    parent, trainer.head = trainer.head, trainer.highest
                    self._publish(trainer.policy, trainer.head, parent, trainer.step)
                trainer.reborn = False
            case HelloRequired():
                trainer.welcome = False
            case BatchGrant(step=step, groups=groups):
                if trainer.welcome and step == trainer.step + 1 and not trainer.final:
                    trainer.grant = groups
                    trainer.reports = [r for r in trainer.reports if r.step >= step]
                    self._check_bodies(trainer)
            case RunState(state=state):
                trainer.stopping = trainer.stopping or state in ("stopping", "finished")
                trainer.over = trainer.over or state == "finished"

    # ---- promises --------------------------------------------------------------------------------

    def lag(self, policy: str, version: int, head: int) -> int:
        """Optimizer steps on the tree path, from the model's own tree."""
        paths = []
        for start in (version, head):
            at: int | None = start
            path = []
            while at is not None:
                path.append(at)
                at = self.tree[policy, at][0]
            paths.append(path)
        fork = next(v for v in paths[0] if v in paths[1])
        step = {v: self.tree[policy, v][1] for v in (version, head, fork)}
        return step[version] + step[head] - 2 * step[fork]

    def _check_bodies(self, trainer: Trainer) -> None:
        """What is granted is in the log, and fresh enough for the head that trains on it."""
        bound = self.spec.policies[policy_name(trainer.policy)].max_policy_lag
        for ref in trainer.grant:
            summary = self.bodies.get(ref.digest)
            if summary is None:
                raise Broken(f"{ref.job} was granted and its body released")
            oldest = summary.versions[trainer.policy][0]
            lag = self.lag(trainer.policy, oldest, trainer.head)
            if lag > bound or ref.policy_lag != lag:
                raise Broken(f"{ref.job}: lag {lag}, said {ref.policy_lag}, bound {bound}")

    def _check_results(self) -> None:
        """An attempt that was revoked before its result came never wins."""
        for job in self.scene.core._ctx.tables.jobs.values():
            if job.result is not None and job.id not in self.won:
                self.won[job.id] = job.result.attempt
                if job.result.attempt in self.revoked:
                    raise Broken(f"{job.id}: revoked {job.result.attempt} won")

    # ---- until the end -----------------------------------------------------------------------

    def round(self) -> None:
        """Everything that can happen happens once, in order."""
        for name in self.agents:
            self.agent_returns(name)
            for policy in self.policies:
                self.agent_updates(name, policy)
            self.agent_beats(name)
            for at in range(4):
                self.agent_starts(name, at)
            self.agent_finishes(name, 0)
            while self.agent_uploads(name):
                pass
        for name, trainer in self.trainers.items():
            trainer.alive = True
            self.trainer_steps(name)
            if trainer.step % 2 == 0:
                self.trainer_checkpoints(name)
            self.trainer_speaks(name)
        for at in range(len(self.unaccepted)):
            self.log_announces(at)
        for at in range(len(self.unaccepted_versions)):
            self.store_announces(at)
        while self.produce():
            pass
        peers = [*self.agents, *self.trainers, TRAJECTORY_LOG, WEIGHT_STORE]
        busy = True
        while busy:
            moved = [self.arrive(peer) or self.hear(peer) for peer in peers]
            busy = any(moved)
        self.pass_time(1.0)

    def finish(self, rounds: int = 300) -> None:
        """Without further mishaps the run comes to its end, and everything is given back."""
        for _ in range(rounds):
            if self.ended and not self.bodies:
                break
            self.round()
        else:
            raise Broken(f"no end in sight: {self.scene.run(self.spec.name)}")
        if self.scene.core._ctx.tables.jobs:
            raise Broken("jobs are left")
