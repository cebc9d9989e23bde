"""The page in a real browser: from a curve to a token, by mouse and keyboard, with the numbers of the run's files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import shutil
import sqlite3
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from servers import KEY, SCRIPTED, Job, until

from palestra.doctor.examination import examine
from palestra.renderers import ByteTokenizer
from palestra.store.browsing import browse, list_episodes, read_episode
from palestra.store.calls import read_trained

pytestmark = pytest.mark.browser
READY_SECONDS = 1.5  # until the first view is drawn, on two shared cores
SEEN_LONG = 20.0  # seconds, for four views with ten megabytes of one line in them
SERIOUS = ("serious", "critical")
WIDTHS = (360, 1280, 2560)
VIOLATIONS = """axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map(one =>
    [one.impact, one.id, one.nodes.map(node => `${node.html.slice(0, 160)} ${node.failureSummary.slice(0, 300)}`)]))"""
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202e\u0007\x1b[2Jend"


def shown(value: float, digits: int = 4) -> str:
    """A number as the page writes it; see `format.js`."""
    if value == 0:
        return "0"
    if float(value).is_integer():
        return f"{value:,.0f}".replace("-", "−")
    places = min(max(0, digits - 1 - math.floor(math.log10(abs(value)))), 6)
    text = f"{value:,.{places}f}".replace("-", "−")
    return text.rstrip("0").rstrip(".") if places else text


def ready(page: Any, address: str) -> None:
    """Wait until the view of an address is drawn."""
    page.wait_for_selector(f'html[data-ready="{address}"]', state="attached")


def visit(page: Any, address: str) -> None:
    page.evaluate("address => { location.hash = address }", address)
    ready(page, address)


def numbers_of(page: Any) -> dict[str, str]:
    tiles = page.locator("main .tile").all()
    return {tile.locator(".label").inner_text(): tile.locator(".number").inner_text() for tile in tiles}


def seconds(value: float) -> str:
    """A duration as the page writes it; see `format.js`."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def facts_of(page: Any) -> dict[str, str]:
    """What the page says of the token that is chosen."""
    page.wait_for_selector(".token-detail dl")
    names = page.locator(".token-detail dt").all_inner_texts()
    return dict(zip(names, page.locator(".token-detail dd").all_inner_texts(), strict=True))


def walk_from_a_curve_to_a_token(page: Any, job: Job, name: str, step: int) -> None:
    """Go from the point of a curve to a token of its step; each number that is read is that of the run's files.

    Args:
        page: at the curves.
        job: whose page it is.
        name: of the run on the page.
        step: the last finished step but one.
    """
    rows = {int(row["step"]): row for row in job.metrics()}
    row, last = rows[step], rows[step + 1]
    until(lambda: numbers_of(page)["reward"] == shown(last["train/reward_mean"], 3), "the newest reward")
    if "validation/reward_mean" in last:
        assert numbers_of(page)["validation"] == shown(last["validation/reward_mean"], 3)

    # The keyboard leads through the curve, and Enter to the step
    page.locator(".plot").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    readout = page.locator(".readout").first.inner_text()
    assert f"step {step}" in readout
    assert shown(row["train/reward_mean"]) in readout
    assert "validation/reward_mean" not in row or shown(row["validation/reward_mean"]) in readout
    page.keyboard.press("Enter")
    ready(page, f"#/run/{name}/step/{step}")
    metrics = {
        "reward": "train/reward_mean",
        "± in the batch": "train/reward_std",
        "validation": "validation/reward_mean",
        "entropy": "train/entropy",
        "gradient": "train/grad_norm",
        "staleness": "rollout/staleness_mean",
        "tokens/s": "rollout/tokens_per_second",
    }
    of_step = {label: shown(row[metric], 3) for label, metric in metrics.items() if metric in row}
    of_step |= {"episodes": shown(row["train/episodes"]), "trained tokens": shown(row["train/trained_tokens"])}
    assert numbers_of(page) == of_step | {"time": seconds(row["time/step_seconds"])}

    # The step's groups have the rewards of the store
    manifest = job.manifests()[step]
    stored = {
        r["episode_id"]: sum(json.loads(r["rewards"]).values())
        for r in job.query("SELECT episode_id, rewards FROM episodes WHERE rewards IS NOT NULL")
    }
    cells = page.locator(".group .cell").all()
    assert [cell.inner_text() for cell in cells][: len(manifest)] == [shown(stored[one], 2) for one in manifest]

    page.locator(".group h3 a").first.click()
    page.wait_for_selector(".member")
    of_group = [one for one in manifest if one.startswith(manifest[0][:12])]
    assert [one.inner_text() for one in page.locator(".member h2").all()] == of_group
    assert [one.inner_text() for one in page.locator(".member .reward b").all()] == [
        shown(stored[one]) for one in of_group
    ]

    page.locator(".member h2 a").first.click()
    page.wait_for_selector(".tokens .t")
    episode = of_group[0]
    assert "Trained." in page.locator(".fate").inner_text()
    with browse(job.run_dir / "run.db") as connection:
        chats = read_episode(connection, episode).trajectory.chats
        trained = read_trained(connection, step, episode)[0]
    replies = [part.inner_text() for part in page.locator(".message.assistant pre").all()]
    assert replies == [chat.reply.text for chat in chats]
    tiles = numbers_of(page)
    sampled = sum(len(chat.completion_ids) for chat in chats)
    assert tiles["reward"] == shown(stored[episode])
    assert (tiles["calls"], tiles["sampled tokens"]) == (shown(len(chats)), shown(sampled))

    # The second token that was sampled, chosen with the arrow keys
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".token-detail dl")
    facts, chat = facts_of(page), chats[0]
    logprob = float(chat.logprobs[1])
    assert facts["id"] == str(chat.completion_ids[1])
    assert facts["logprob when sampled"] == shown(logprob, 6)
    assert facts["probability"] == f"{shown(math.exp(logprob) * 100)} %"
    assert facts["logprob when trained"] == shown(float(trained.logprobs[1]), 6)
    assert facts["ratio"] == shown(math.exp(trained.logprobs[1] - logprob), 6)
    assert facts["version"] == str(chat.versions[0].version)
    assert facts["temperature"] == shown(chat.sampling.temperature)
    assert facts["call"] == "0 of agent"
    rewards = [stored[one] for one in of_group]  # GRPO: the reward less the mean, over the deviation
    advantage = (rewards[0] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6)
    assert float(facts["advantage"].replace("−", "-")) == pytest.approx(advantage, rel=1e-3)
    assert page.locator(".token-text").inner_text() == ByteTokenizer().decode([int(chat.completion_ids[1])])
    assert f"trained in step {step}" in page.locator(".token-detail .why").inner_text()
    assert page.locator(".t.chosen").count() == 1


def test_from_a_curve_to_a_token_with_the_numbers_of_the_run(finished, dashboard, open_page):
    link, _ = dashboard(finished.run_dir)
    page = open_page(link)
    assert "once-" not in page.evaluate("location.href")
    walk_from_a_curve_to_a_token(page, finished, "run", 2)

    # An address with a token leads to the same token
    address, facts = page.evaluate("location.href"), facts_of(page)
    page.goto("about:blank")
    page.goto(address)
    assert facts_of(page) == facts

    # And back up again with a key
    page.keyboard.press("u")
    page.wait_for_selector(".member")
    page.keyboard.press("]")
    page.wait_for_selector('h1:has-text("Group 3")')


def test_from_a_curve_to_a_token_while_the_job_runs(open_page, tmp_path):
    with Job(tmp_path, SCRIPTED | {"steps": 50}) as job:
        server = job.start()
        page = open_page(f"{job.url}/dashboard", key=KEY)
        worker = job.work()
        until(lambda: len(job.manifests()) > 3, "the batch of the fourth step")
        worker.kill()
        page.wait_for_selector("#live.live")
        walk_from_a_curve_to_a_token(page, job, "job", int(job.metrics()[-1]["step"]) - 1)
        assert server.popen.poll() is None
        visit(page, "#/")
        assert page.locator(".card .badge").first.inner_text() == "running"
        assert "engine 0 running, 0 waiting" in page.locator(".health").inner_text()


def test_tokens_are_coloured_by_any_of_their_numbers(finished, dashboard, open_page):
    link, _ = dashboard(finished.run_dir)
    page = open_page(link)
    visit(page, f"#/run/run/episode/{finished.manifests()[2][0]}")
    page.wait_for_selector(".tokens .t")
    wanted = {
        "logprob": "≥ 90 %",
        "trained_logprob": "≥ 90 %",
        "ratio": "about 1",
        "advantage": "> 0",
        "trained": "sampled, not trained",
        "fate": "trained in step 2",
        "version": "0.1",
        "call": "call 1",
        "temperature": "1",
        "grammar": "sampled freely",
        "weight": "has one",
    }
    assert page.locator("#colour option").evaluate_all("all => all.map(one => one.value)") == list(wanted)
    for colour, label in wanted.items():
        page.select_option("#colour", colour)
        assert label in page.locator(".tokenpart .legend").inner_text(), colour
        kinds = page.locator(".tokens .t.sampled").first.get_attribute("class").split()
        assert any(kind[:2] in ("p-", "a-", "t-", "v-") for kind in kinds), (colour, kinds)


def test_the_page_is_ready_soon_and_asks_little(finished, dashboard, open_page):
    link, _ = dashboard(finished.run_dir)
    page = open_page(link)
    page.reload()  # the second time: Python has loaded what it needs
    page.wait_for_selector("html[data-ready]", state="attached")
    took = page.evaluate("performance.getEntriesByName('palestra-ready')[0].startTime") / 1000
    assert took < READY_SECONDS
    transferred = page.evaluate(
        "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.decodedBodySize, 0)"
    )
    assert transferred < 400_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_keeps_anybody_from_using_any_view(finished, dashboard, open_page, axe, scheme):
    link, _ = dashboard(finished.run_dir)
    episode = finished.manifests()[2][0]
    of_run = (
        "steps",
        "step/2",
        f"group/train/{int(episode[6:12])}",
        f"episode/{episode}",
        "episodes",
        "findings",
        "costs",
        "talk",
        "settings",
    )
    views = ["#/", *(f"#/run/run/{view}" for view in (*of_run, "events", "nowhere"))]
    page = open_page(link, scheme=scheme)
    page.evaluate(axe)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for address in views:
            visit(page, address)
            time.sleep(0.2)  # until charts and tokens that come into sight are drawn
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{address} is wider than {width} px"
            if width != 1280:
                continue
            found = page.evaluate(VIOLATIONS)
            assert [one for one in found if one[0] in SERIOUS] == [], address


def test_several_runs_stand_beside_one_another(finished, dashboard, open_page, tmp_path):
    shutil.copytree(finished.run_dir, tmp_path / "second")
    link, _ = dashboard(finished.run_dir, tmp_path / "second")
    page = open_page(link)
    assert [one.inner_text() for one in page.locator(".card h2").all()] == ["run", "second"]
    readout = page.locator(".readout").first
    assert "run training" in readout.inner_text()
    assert "second validation" in readout.inner_text()
    page.locator("input[aria-label='Draw second']").uncheck()
    assert "second" not in readout.inner_text()
    for below in ("tokens", "seconds"):
        page.select_option("select[name=x]", below)
    page.locator(".smoothing input").fill("0.9")
    page.fill("#search", "entropy")
    page.fill("#search", "no such metric")
    assert "No metric has" in page.locator(".sections").inner_text()


def test_a_search_finds_episodes_by_reward_and_text(finished, dashboard, open_page):
    link, _ = dashboard(finished.run_dir)
    page = open_page(link)
    with browse(finished.run_dir / "run.db") as connection:
        every = list_episodes(connection, "train", None, 100)
    visit(page, "#/run/run/episodes")
    assert page.locator("tbody tr").count() == len(every) == 12
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    page.fill("[name=least_reward]", "0.5")
    page.click("form.filters button")
    page.wait_for_selector('html[data-ready*="least_reward"]', state="attached")
    wanted = sorted((one.episode_id for one in every if (one.reward or 0) >= 0.5), reverse=True)
    assert page.locator("tbody tr td:first-child").all_inner_texts() == wanted
    task = every[0].task_id
    page.fill("[name=text]", task)
    page.keyboard.press("Enter")
    page.wait_for_selector('html[data-ready*="text="]', state="attached")
    assert page.locator("tbody tr").count() == sum(one.task_id == task and (one.reward or 0) >= 0.5 for one in every)


def test_what_episodes_say_can_do_nothing(finished, dashboard, open_page, tmp_path):
    folder = tmp_path / "hostile"
    shutil.copytree(finished.run_dir, folder)
    name = finished.manifests()[2][0]
    reply = json.dumps({"role": "assistant", "content": [{"type": "text", "text": HOSTILE}]})
    long = json.dumps([{"role": "user", "content": [{"type": "text", "text": "x" * 10_000_000}]}])
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("UPDATE chats SET reply = ? WHERE episode_id = ?", (reply, name))
        connection.execute("UPDATE chats SET messages = ? WHERE episode_id = ? AND idx = 0", (long, name))
        connection.execute(
            "UPDATE episodes SET metadata = ?, task_data = ? WHERE episode_id = ?",
            (json.dumps({"a": HOSTILE}), json.dumps({"text": HOSTILE}), name),
        )
        connection.execute("UPDATE events SET data = json_set(data, '$.episode_id', ?)", (HOSTILE,))
    connection.close()
    link, _ = dashboard(folder)
    page = open_page(link)
    started = time.monotonic()
    for address in (
        f"#/run/hostile/episode/{name}",
        f"#/run/hostile/group/train/{int(name[6:12])}",
        "#/run/hostile/step/2",
        "#/run/hostile/events",
    ):
        visit(page, address)
        assert "owned" not in page.title()
        assert page.locator("main img").count() == 0
        text = page.locator("main").inner_text()
        assert not set("\u202e\u0007\x1b") & set(text)
    assert time.monotonic() - started < SEEN_LONG
    visit(page, f"#/run/hostile/episode/{name}")
    said = page.locator(".message.assistant pre").first.inner_text()
    assert said.startswith("<img src=x")
    assert "U+202E" in said
    assert "␛[2J" in said
    assert "further characters" in page.locator(".message.user").first.inner_text()


def test_damage_and_wrong_addresses_are_said_in_words(finished, dashboard, open_page, tmp_path):
    folder = tmp_path / "hurt"
    shutil.copytree(finished.run_dir, folder)
    name = finished.manifests()[2][0]
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("UPDATE episodes SET rewards = '{rubbish' WHERE episode_id = ?", (name,))
    connection.close()
    broken = tmp_path / "broken"
    shutil.copytree(finished.run_dir, broken)
    (broken / "run.db").write_bytes(b"rubbish " * 999)
    link, process = dashboard(folder, broken)
    page = open_page(link)
    assert "damaged" in page.locator(".card .problem").inner_text()
    visit(page, "#/run/hurt/episodes")
    assert page.locator("td.problem").count() == 1
    assert page.locator("tbody tr").count() == 12
    visit(page, "#/run/hurt/step/77")
    assert "no step 77" in page.locator("[role=alert]").inner_text()
    visit(page, "#/run/other/steps")
    assert "no run other" in page.locator("[role=alert]").inner_text()
    for name in ("constructor", "toString", "__proto__"):
        visit(page, f"#/run/hurt/{name}")
        assert "nothing at this address" in page.locator("[role=alert]").inner_text()
    process.kill()
    visit(page, "#/run/hurt/step/1")
    assert "can't be reached" in page.locator("[role=alert]").inner_text()


def test_a_link_opens_one_page_and_other_tabs_get_the_key_from_it(finished, dashboard, open_page, chromium):
    link, _ = dashboard(finished.run_dir)
    page = open_page(link)
    other = page.context.new_page()
    other.goto(link.split("#")[0] + "#/run/run/steps")
    ready(other, "#/run/run/steps")
    with_link_again = chromium.new_context().new_page()
    with_link_again.goto(link)
    with_link_again.wait_for_selector("#key")
    assert "used already" in with_link_again.locator("[role=alert]").inner_text()
    with_link_again.context.close()
    assert page.context.cookies() == []


@contextlib.contextmanager
def as_if_running(finished: Job, folder: Path, *names: str) -> Iterator[list[Path]]:
    """Give folders of runs whose locks are held, as if processes ran them."""
    with contextlib.ExitStack() as stack:
        runs = [folder / name for name in names]
        for run in runs:
            shutil.copytree(finished.run_dir, run)
            with contextlib.closing(sqlite3.connect(run / "run.db")) as connection, connection:
                connection.execute("DELETE FROM events WHERE kind = 'completed'")
            lock = stack.enter_context((run / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield runs


def end_step(run: Path, step: int, **further: float) -> None:
    """Write what a learner writes at the end of a step; `__` in a metric's name stands for `/`."""
    more = {name.replace("__", "/"): value for name, value in further.items()}
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection, connection:
        (newest,) = connection.execute("SELECT data FROM metric_rows ORDER BY step DESC LIMIT 1").fetchone()
        row = json.dumps(json.loads(newest) | {"step": step, "train/reward_mean": step / 8} | more)
        connection.execute("INSERT INTO metric_rows (step, data) VALUES (?, ?)", (step, row))
        connection.execute("INSERT INTO events (at, kind, data) VALUES (1.0, 'step', ?)", (row,))


def set_hidden(page: Any, hidden: bool) -> None:
    """Hide a tab, or show it. Tabs of a browser without a screen are never hidden."""
    page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


def test_many_runs_and_hidden_tabs_leave_the_page_its_connections(finished, dashboard, open_page, tmp_path):
    names = [f"r{number}" for number in range(8)]
    with as_if_running(finished, tmp_path / "runs", *names) as runs:
        link, _ = dashboard(*runs)
        page = open_page(link)
        page.wait_for_selector("#live.live")
        for name in names:
            visit(page, f"#/run/{name}/settings")
        end_step(runs[7], 9)
        visit(page, "#/run/r7/steps")
        page.wait_for_selector("tbody a:has-text('9')")
        for _ in range(7):
            set_hidden(page, True)
            page = page.context.new_page()
            page.set_default_timeout(10_000)
            page.goto(link.split("#")[0] + "#/run/r7/steps")
            ready(page, "#/run/r7/steps")
            page.wait_for_selector("#live.live")


def test_windows_beyond_the_browsers_connections_have_news_too(finished, dashboard, open_page, tmp_path):
    with as_if_running(finished, tmp_path / "runs", "one") as (one,):
        link, _ = dashboard(one)
        windows = [open_page(link)]
        for _ in range(8):
            window = windows[0].context.new_page()
            window.set_default_timeout(10_000)
            window.goto(link.split("#")[0] + "#/run/one/steps")
            ready(window, "#/run/one/steps")
            window.wait_for_selector("#live.live")
            windows.append(window)
        visit(windows[0], "#/run/one/steps")
        for newest in (11, 12):
            end_step(one, newest)
            for window in windows:
                window.wait_for_selector(f"tbody a:has-text('{newest}')")
            windows.pop(0).close()  # its stream is another window's now
        steps = [window.locator("tbody td:first-child").all_inner_texts() for window in windows]
        assert steps == [["12", "11", "3", "2", "1", "0"]] * len(windows)


def test_a_tab_that_is_shown_again_has_every_step_once(finished, dashboard, open_page, tmp_path):
    with as_if_running(finished, tmp_path / "runs", "one", "two") as (one, two):
        link, _ = dashboard(one, two)
        page = open_page(link)
        steps = page.locator("tbody td:first-child")
        visit(page, "#/run/one/steps")
        before = steps.all_inner_texts()
        for newest in (11, 13):
            page.wait_for_selector("#live.live")
            set_hidden(page, True)
            end_step(one, newest)
            end_step(two, newest)
            time.sleep(1.5)
            assert str(newest) not in steps.all_inner_texts(), "a hidden tab follows nothing"
            set_hidden(page, False)
            end_step(one, newest + 1)
            page.wait_for_selector(f"tbody a:has-text('{newest + 1}')")
        assert steps.all_inner_texts() == ["14", "13", "12", "11", *before]
        visit(page, "#/run/two/steps")
        assert steps.all_inner_texts() == ["13", "11", *before]


def skip_updates(run: Path, *steps: int) -> None:
    """Plant what the doctor calls `updates_skipped` in steps that are finished."""
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection, connection:
        for step in steps:
            connection.execute(
                "UPDATE metric_rows SET data = json_set(data, '$.\"train/updates_skipped\"', 1.0) WHERE step = ?",
                (step,),
            )


def finding_of(page: Any, code: str) -> dict[str, str]:
    """What the page says of a finding; its badge and its steps stand under `when`."""
    node = page.locator(f".finding:has(h2:text-is('{code.replace('_', ' ')}'))")
    facts = dict(zip(node.locator("dt").all_inner_texts(), node.locator("dd").all_inner_texts(), strict=True))
    return facts | {"when": node.locator(".head").inner_text()}


def test_findings_are_those_of_the_doctor_and_lead_to_their_episodes(finished, dashboard, open_page, tmp_path):
    with as_if_running(finished, tmp_path / "runs", "one") as (one,):
        skip_updates(one, 2)
        link, _ = dashboard(one)
        page = open_page(link)
        visit(page, "#/run/one/findings")
        wanted = {finding.code: finding for finding in examine(one).findings}
        assert [text.replace(" ", "_") for text in page.locator(".finding h2").all_inner_texts()] == list(wanted)
        said, skipped = finding_of(page, "updates_skipped"), wanted["updates_skipped"]
        assert (said["seen"], said["it means"], said["try"]) == (skipped.seen, skipped.means, skipped.remedy)
        assert "in step 2, not any more" in said["when"]

        # While it runs: the newest step shows the sign, and the page says so without being asked
        page.wait_for_selector("#live.live")
        end_step(one, 4, train__updates_skipped=1.0)
        page.wait_for_selector(".finding.holds h2:text-is('updates skipped')")
        assert "since step 4" in finding_of(page, "updates_skipped")["when"]

    with_episodes = tmp_path / "finished"
    shutil.copytree(finished.run_dir, with_episodes)
    with contextlib.closing(sqlite3.connect(with_episodes / "run.db")) as connection, connection:
        connection.execute("UPDATE metric_rows SET data = json_set(data, '$.\"rollout/truncated_share\"', 1.0)")
    link, _ = dashboard(with_episodes)
    page = open_page(link)
    visit(page, "#/run/finished/findings")
    shows = next(finding for finding in examine(with_episodes).findings if finding.code == "truncated")
    assert finding_of(page, "truncated")["episodes"] == ", ".join(shows.episodes)
    page.locator(f".finding a:text-is('{shows.episodes[0]}')").first.click()
    page.wait_for_selector(f"h1:has-text('{shows.episodes[0]}')")


def test_a_policy_is_talked_to_from_a_message_of_an_episode_and_nothing_is_recorded(open_page, tmp_path):
    with Job(
        tmp_path,
        SCRIPTED | {"steps": 50, "evaluation": {"every_steps": 0}, "checkpoint": {"every_steps": 1, "keep": 2}},
    ) as job:
        job.start()
        worker = job.work()
        until(lambda: 2 in job.manifests(), "the batch of the second step")
        worker.kill()
        until(lambda: len(job.checkpoints()) == 2, "the checkpoints of both steps")
        viewer = httpx2.post(f"{job.url}/dashboard/session", headers={"authorization": f"Bearer {KEY}"}).json()["key"]
        page = open_page(f"{job.url}/dashboard", key=viewer)
        name = job.manifests()[1][0]
        visit(page, f"#/run/job/episode/{name}")
        page.locator(".message.user .talkfrom").first.click()
        page.wait_for_selector("#talk-key")
        assert "may look" in page.locator(".talk form").inner_text()
        page.fill("#talk-key", viewer)
        page.click(".talk form button")
        page.wait_for_selector("[role=alert]:has-text('may look, and not talk')")
        page.fill("#talk-key", KEY)
        page.click(".talk form button")
        page.wait_for_selector(".composer textarea")
        assert KEY not in json.dumps(page.evaluate("[{...sessionStorage}, location.href]"))
        before = job.query("SELECT count(*) AS n FROM chats")[0]["n"]
        assert page.locator(".talk .message").count() == 1
        page.click(".composer .primary")
        until(lambda: page.locator(".talk .message.assistant button").count() == 2, "the end of the reply")
        page.fill(".composer textarea", "and now?")
        page.keyboard.press("Control+Enter")
        until(lambda: page.locator(".talk .message.assistant button").count() == 4, "the end of the second reply")
        page.locator(".talk .message.user button:text-is('edit')").last.click()
        assert page.input_value(".composer textarea") == "and now?"
        assert page.locator(".talk .message").count() == 2
        assert page.locator("select[name=policy] option").all_inner_texts() == [
            "policy",
            "policy@step-2",
            "policy@step-1",
        ]
        page.select_option("select[name=policy]", "policy@step-1")
        page.click(".composer .primary")
        until(lambda: page.locator(".talk .message.assistant button").count() == 4, "the reply of the checkpoint")
        assert page.locator(".talk [role=alert]").inner_text() == ""
        assert job.query("SELECT count(*) AS n FROM chats")[0]["n"] == before


def test_a_checkpoint_of_a_folder_is_loaded_and_talked_to_from_a_message_of_an_episode(finished, dashboard, open_page):
    link, process = dashboard(finished.run_dir)
    page = open_page(link)
    visit(page, f"#/run/run/episode/{finished.manifests()[2][0]}")
    page.locator(".message.assistant .talkfrom").first.click()
    page.wait_for_selector(".talk .local")
    assert page.locator(".composer").count() == 0
    steps = [int(path.name.removeprefix("step-")) for path in reversed(finished.checkpoints())]
    assert page.locator("select[name=checkpoint] option").all_inner_texts() == [f"policy@step-{step}" for step in steps]
    files = {path: path.stat().st_mtime_ns for path in finished.run_dir.rglob("*") if path.is_file()}
    page.click(".local button:text-is('Load this checkpoint')")
    page.wait_for_selector(".local [role=status]:has-text('loading')")
    page.wait_for_selector(".composer textarea")
    assert "answers, from a process of its own" in page.locator(".local [role=status]").inner_text()
    assert page.locator(".talk .message").count() == 2
    page.fill(".composer textarea", "and now?")
    page.keyboard.press("Control+Enter")
    until(lambda: page.locator(".talk .message.assistant button").count() == 4, "the end of the reply")
    assert page.locator(".talk .message").count() == 4
    assert [said.inner_text() for said in page.locator(".talk [role=alert]").all()] == ["", ""]
    assert {path: path.stat().st_mtime_ns for path in finished.run_dir.rglob("*") if path.is_file()} == files
    (child,) = psutil.Process(process.popen.pid).children()
    page.click(".local button:text-is('End it')")
    page.wait_for_selector(".talk summary:has-text('A command that serves')")
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
    assert page.locator(".composer").count() == 0
    assert page.locator(".talk .message").count() == 4, "what was said stays"


def test_a_folder_without_checkpoints_says_why_none_is_loaded_and_which_command_serves(
    finished, dashboard, open_page, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(finished.run_dir, folder)
    shutil.rmtree(folder / "checkpoints")
    link, _ = dashboard(folder)
    page = open_page(link)
    visit(page, f"#/run/run/episode/{finished.manifests()[2][0]}")
    page.locator(".message.assistant .talkfrom").first.click()
    page.wait_for_selector(".talk .local")
    said = page.locator(".talk").inner_text()
    assert "No checkpoint can be loaded from this page: this run has no checkpoint yet." in said
    assert "No engine runs here" in said
    assert f"--set policies.policy.model={folder}" in said
    page.click(".talk summary:has-text('body of a request')")
    body = json.loads(page.locator(".talk details pre").inner_text())
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]


def test_a_running_job_shows_each_step_as_it_ends(open_page, tmp_path):
    slow = SCRIPTED | {"steps": 6, "engine": {"kind": "fake", "reply_tokens": 8, "delay_seconds": 0.04}}
    with Job(tmp_path, slow) as job:
        job.start()
        page = open_page(f"{job.url}/dashboard", key=KEY)
        assert KEY not in json.dumps(page.evaluate("[sessionStorage['palestra-key'], location.href, document.cookie]"))
        assert "No step is finished yet" in page.locator(".sections").inner_text()
        job.work()
        page.wait_for_selector(".plot canvas", timeout=60_000)  # which also the evaluation before the first step draws
        until(lambda: any(row["step"] >= 1 for row in job.metrics()), "the end of the first step")
        visit(page, "#/run/job/step/1")
        until(lambda: page.locator(".group").count() == 2, "both groups of the step")
        visit(page, "#/")
        page.wait_for_selector("text=6 of 6 steps", timeout=60_000)
        newest = shown(job.metrics()[-1]["train/reward_mean"])
        until(lambda: newest in page.locator(".readout").first.inner_text(), "the newest reward")
        page.wait_for_selector(".card .badge:has-text('completed')")
