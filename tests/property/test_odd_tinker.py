"""Whatever a client of a Tinker server sends, it is answered below 500, its futures fail as its own mistakes, and
the server logs no error."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from odd_values import NUMBERS, odd_bodies, quiet_log, written
from unit.tinker.messages import batch_message, datum, tensor
from unit.tinker.serving import Client, Failed, running

from palestra_bases.tinker import protobuf
from palestra_bases.tinker.records import TinkerLimits

META = {"a": 1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
SAMPLING = {"max_tokens": 2, "seed": 1, "stop": [5], "temperature": 1.0, "top_k": 3, "top_p": 0.5}
LORA = {"rank": 2, "seed": 1, "train_unembed": True}
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
# SESSION, MODEL, PATH, SAMPLER and REQUEST stand for what the client has; NUMBER for the next number.
BODIES = {
    "create_session": {"tags": ["a"], "sdk_version": "1", "user_metadata": META},
    "session_heartbeat": {"session_id": "SESSION"},
    "sessions/none/finish": {"reason": {"a": 1}, "detail": "x"},
    "create_model": {
        "session_id": "SESSION",
        "model_seq_id": "NUMBER",
        "base_model": "tiny-random",
        "lora_config": LORA,
        "user_metadata": META,
    },
    "load_weights": {"session_id": "SESSION", "model_seq_id": "NUMBER", "path": "PATH", "optimizer": True},
    "optim_step": {"model_id": "MODEL", "seq_id": "NEXT", "adam_params": ADAM},
    "save_weights": {"model_id": "MODEL", "seq_id": "NEXT", "path": "x", "ttl_seconds": 100, "overwrite": True},
    "save_weights_for_sampler": {"model_id": "MODEL", "seq_id": "NEXT", "sampling_session_seq_id": "NUMBER"},
    "copy_weights": {"source_path": "PATH", "session_id": "SESSION", "model_seq_id": "NUMBER", "ttl_seconds": 100},
    "get_info": {"model_id": "MODEL"},
    "weights_info": {"tinker_path": "PATH"},
    "create_sampling_session": {
        "session_id": "SESSION",
        "sampling_session_seq_id": "NUMBER",
        "base_model": "tiny-random",
    },
    "join_sampling_session": {"sampling_session_id": "SAMPLER"},
    "asample": {
        "sampling_session_id": "SAMPLER",
        "seq_id": "NUMBER",
        "num_samples": 2,
        "prompt": PROMPT,
        "sampling_params": SAMPLING,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    },
    "retrieve_future": {"request_id": "REQUEST"},
    "cancel_future": {"request_id": "REQUEST"},
    "retrieve_futures": {"target": {"sampling_session_id": "SAMPLER"}, "prev_cursor": 0, "timeout": 0.0},
}


class Used:
    """A client with a session, a model, a checkpoint, a sampler and a request."""

    def __init__(self, server) -> None:
        self.client = Client(server.url, server.key())
        self.model = self.client.model()
        self.known = {
            "SESSION": self.client.session_id,
            "MODEL": self.model.model_id,
            "PATH": self.model.saves("one"),
            "SAMPLER": self.client.sampler(base_model="tiny-random"),
            "REQUEST": self.model.steps(),
        }
        self.number = 100

    def filled(self, body):
        if isinstance(body, dict):
            return {key: self.filled(value) for key, value in body.items()}
        if body == "NUMBER":
            self.number += 1
            return self.number
        if body == "NEXT":
            return self.model.seq_id + 1
        return self.known.get(body, body) if isinstance(body, str) else body

    def post(self, route, content, kind="application/json", waits=True) -> int:
        """Send something, and wait for the result where it was accepted, unless it stands behind a gap."""
        answer = self.client.http.post(route, content=content, headers={"content-type": kind})
        assert answer.status_code < 500, (route, content, answer.text)
        found = answer.json() if answer.headers["content-type"] == "application/json" else {}
        if answer.status_code != 200 or "request_id" not in found or route.startswith("retrieve") or not waits:
            return answer.status_code
        category = ""
        try:
            self.client.result(found["request_id"])
        except Failed as error:
            category = error.category
        assert category in ("", "user"), (route, content)
        return answer.status_code


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    limits = TinkerLimits(poll_seconds=0.2, models=10**4, checkpoints=10**4, samplers=10**4)
    with running(tmp_path_factory.mktemp("tinker"), limits) as server:
        yield Used(server)


@examples(4, 60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("route", BODIES)
def test_a_body_in_which_anything_is_changed_is_answered(used, route, data):
    body = data.draw(odd_bodies(used.filled(BODIES[route])))
    in_order = BODIES[route].get("seq_id") == "NEXT" and isinstance(body, dict)
    is_next = in_order and body.get("seq_id") == used.model.seq_id + 1
    with quiet_log():
        status = used.post(route, written(body), waits=is_next or not in_order)
    used.model.seq_id += is_next and status == 200


SHAPES = [[2], [3], [1, 2], [2, 1], [0], [-1], [2**62, 2**62], []]
values = st.lists(st.sampled_from([0, 1, -1, 300, 2**31, 2**62, 0.5, 1e30]), min_size=1, max_size=4)


@examples(12, 200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 5, 258, 300, -1, 2**31 - 1]), max_size=4),
    inputs=st.dictionaries(
        st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "mask", "\0"]),
        st.tuples(values, st.sampled_from(["float32", "int64"]), st.none() | st.sampled_from(SHAPES)),
        max_size=4,
    ),
    loss=st.sampled_from(["cross_entropy", "ppo", "importance_sampling", "none", ""]),
    config=st.dictionaries(st.sampled_from(["clip_low_threshold", "x"]), st.floats(), max_size=2),
    bytes_in_place=st.none() | st.binary(max_size=30),
)
def test_a_batch_of_any_kind_is_answered(used, tokens, inputs, loss, config, bytes_in_place):
    made = datum(tokens, [1] * len(tokens))
    for name, (numbers, kind, shape) in inputs.items():
        whole = [int(min(number, 2**62)) for number in numbers] if kind == "int64" else numbers
        made.loss_fn_inputs[name].CopyFrom(tensor(np.array(whole, float if kind != "int64" else np.int64), kind, None))
        if shape is not None:
            del made.loss_fn_inputs[name].shape[:]
            made.loss_fn_inputs[name].shape.extend(shape)
    message = batch_message([made], loss, config, model_id=used.model.model_id, seq_id=used.model.seq_id + 1)
    content = message.SerializeToString() if bytes_in_place is None else bytes_in_place
    with quiet_log():
        status = used.post("forward_backward", content, protobuf.CONTENT_TYPE)
    used.model.seq_id += bytes_in_place is None and status == 200


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_no_number_is_too_large(used, number):
    with quiet_log():
        for route, body in BODIES.items():
            for key in body:
                if key.endswith(("seq_id", "samples", "k_prompt_logprobs", "seconds", "cursor", "timeout")):
                    in_order = body.get("seq_id") == "NEXT"
                    status = used.post(route, written(used.filled(body) | {key: number}), waits=not in_order)
                    used.model.seq_id += in_order and key != "seq_id" and status == 200
