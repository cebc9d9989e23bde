"""Writing a configuration and reading it again gives an equal one."""

from __future__ import annotations

import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from palestra.config import JobConfig, dump_config, parse_config

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
# A path may hold anything but NUL; lone surrogates are what Python makes of bytes that are no UTF-8.
paths = st.text(min_size=1, max_size=30, alphabet=st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
positive = st.floats(min_value=1e-300, max_value=1e300)
up_to_a_thousand = st.floats(0, 1e3, exclude_min=True)
below_one = st.floats(0, 1, exclude_max=True)

configs = st.builds(
    dict,
    name=names,
    seed=st.integers(0, 2**63 - 1),
    steps=st.integers(1, 2**62),
    deterministic=st.booleans(),
    run_dir=st.none() | paths,
    policies=st.dictionaries(
        names,
        st.fixed_dictionaries(
            {},
            optional={
                "model": paths,
                "max_context": st.integers(1, 2**40),
                "sampling": st.fixed_dictionaries({"temperature": st.floats(1e-12, 10)}),
                "optimizer": st.fixed_dictionaries(
                    {
                        "learning_rate": up_to_a_thousand,
                        "betas": st.tuples(below_one, below_one),
                        "schedule": st.sampled_from(["constant", "linear", "cosine"]),
                    }
                ),
            },
        ),
        min_size=1,
        max_size=1,
    ),
    tasks=st.fixed_dictionaries({}, optional={"train": paths, "validation": paths}),
    engine=st.fixed_dictionaries({}, optional={"threads": st.none() | st.integers(1, 64)}),
    server=st.fixed_dictionaries({"host": st.text(max_size=20, alphabet=st.characters(exclude_categories=("Cs",)))}),
)


@given(configs)
def test_dump_and_parse_are_inverse(data):
    config = JobConfig.model_validate(data)
    again = parse_config(tomllib.loads(dump_config(config)))
    assert again == config
    assert again.digest() == config.digest()


@given(st.characters())
def test_no_character_breaks_the_file(character):
    if character == "\0" or "\ud800" <= character <= "\udfff":
        return
    config = JobConfig(run_dir=Path(f"a{character}b"))
    assert parse_config(tomllib.loads(dump_config(config))).run_dir == config.run_dir
