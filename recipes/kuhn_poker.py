"""Two policies play poker against each other and are trained apart: how near to perfect play do they come?

    python recipes/kuhn_poker.py [--steps 120] [--seed 0] [--against self|frozen|shared] [--model tiny-random]

Kuhn poker has three cards and twelve information states, so nothing has to be estimated: the probabilities of all
moves are read off the models, and exploitability follows exactly (0 for perfect play, 0.458 at random; perfect play
brings the first player -1/18 a game). The curves of the two oppose each other, and the last policies circle around the
solution while their average comes near it. `--against frozen` trains the first player alone, against a second that
moves at random; `--against shared` has one policy for both. What it prints is in README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import palestra
from palestra import ChoiceQuestion, JobConfig, choice_probabilities, model_folder
from palestra_worlds import KuhnPoker as Game  # YOURS 1: a game with roles
from palestra_worlds import KuhnPolicy


def tiny_model(folder: Path, name: str) -> str:
    """Return a model of random weights three times as large, to which one card is not like another from the start."""
    if name != "tiny-random":
        return name
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype="float32")
    for weight in model.parameters():
        weight.data.mul_(3.0 if weight.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder(name)).save_pretrained(folder)
    return str(folder)


def job(seed: int, steps: int, against: str, model: str) -> JobConfig:
    """Return what is trained, and how."""
    trained = {
        "model": model,
        "max_context": 96,
        # Adam's momentum keeps players circling around each other, so it has little of it.
        "optimizer": {"learning_rate": 1e-3, "betas": (0.5, 0.99), "schedule": "linear"},
    }
    # Entropy keeps two learners from chasing each other; against one that stays as it is, it would only cost. With one
    # policy for both, each role answers for its own reward: both together would always be 0.
    bonus = 0.0 if against == "frozen" else 0.2
    algorithm = {"name": "rloo", "credit": "agent", "loss_agg_mode": "token-mean", "entropy_coefficient": bonus}
    second = {"model": "tiny-random", "max_context": 96, "frozen": True} if against == "frozen" else trained
    return JobConfig.model_validate(
        {
            "name": f"kuhn-{against}-{seed}",
            "seed": seed,
            "steps": steps,
            "policies": {"first": trained} | ({} if against == "shared" else {"second": second}),  # YOURS 2: who plays
            "roles": {"first": "first", "second": "first" if against == "shared" else "second"},
            "rollout": {"groups_per_step": len(KuhnPolicy.deals), "group_size": 64},
            "algorithm": algorithm,
            "evaluation": {"every_steps": 0},
            "checkpoint": {"every_steps": 2, "keep": steps},
            "engine": {"dtype": "float32", "threads": 1, "max_batch": 256},  # too small a model for more threads
            "trainer": {"dtype": "float32", "threads": 1, "micro_batch_tokens": 2048},
        }
    )


def read_off(first: Path | str, second: Path | str) -> KuhnPolicy:
    """Return the policies of two models: the probability of a bet in each information state."""
    found = {}
    for model, states in ((first, KuhnPolicy.first_states), (second, KuhnPolicy.second_states)):
        answers = choice_probabilities(str(model), [question(state) for state in states])
        found |= {state: answer["b"] for state, answer in zip(states, answers, strict=True)}
    return KuhnPolicy(found)


def question(state: str) -> ChoiceQuestion:
    """Return the conversation in which a player is in an information state: in `0pb`, it has passed with card 0."""
    said = [("user", state[0]), ("assistant", "p"), ("user", state)] if state.endswith("pb") else [("user", state)]
    return ChoiceQuestion(messages=[{"role": role, "content": text} for role, text in said], choices=("p", "b"))


def demonstrate(steps: int = 120, seed: int = 0, against: str = "self", model: str = "tiny-random") -> None:
    """Train, and print how exploitable the last policies and their average are."""
    tasks = [{"id": f"deal-{a}{b}", "cards": [a, b]} for a, b in KuhnPolicy.deals]  # YOURS 3: what is dealt
    config = job(seed, steps, against, tiny_model(Path("runs") / "kuhn-model", model))
    result = palestra.train(environment=Game, tasks=tasks, config=config, concurrency=256)
    rows = truth(result.run_dir, config, against)
    print("         games  exploitability: last  average   value: last  average")
    for games, *numbers in rows[-1 :: -max(1, len(rows) // 12)][::-1]:
        print("{:14,.0f}  {:20.3f}  {:7.3f}  {:12.3f}  {:7.3f}".format(games, *numbers))
    if against == "frozen":
        first = checkpoint(result.run_dir, "first", steps)
        best = read_off(first, config.policies["second"].model).best_responses[0]
        print(f"the first player wins {rows[-1][3]:.3f} a game, and a best response {best:.3f}")


def truth(run: Path, config: JobConfig, against: str) -> list[tuple[float, ...]]:
    """Return for each checkpoint the games, exploitability of the last and of the average, and the values of both."""
    rows, sums = list[tuple[float, ...]](), dict[str, float]()
    for count, step in enumerate(range(2, config.steps + 1, 2), 1):
        first = checkpoint(run, "first", step)
        others = {"self": checkpoint(run, "second", step), "shared": first}
        last = read_off(first, others[against] if against in others else config.policies["second"].model)
        sums = {state: sums.get(state, 0.0) + bet for state, bet in last.bets.items()}
        average = KuhnPolicy({state: total / count for state, total in sums.items()})
        games = step * len(KuhnPolicy.deals) * config.rollout.group_size
        rows.append((games, last.exploitability, average.exploitability, last.value, average.value))
    return rows


def checkpoint(run: Path, policy: str, step: int) -> Path:
    """Return the folder of a policy's checkpoint; those of a single trained policy have no folder of its own."""
    own = run / "checkpoints" / policy
    return (own if own.is_dir() else own.parent) / f"step-{step:06d}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two policies play Kuhn poker against each other.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", choices=("self", "frozen", "shared"), default="self")
    parser.add_argument("--model", default="tiny-random")
    demonstrate(**vars(parser.parse_args()))
