"""The page over the runs answers what is asked of it and nothing else."""

from __future__ import annotations

import http.client
import io
import json
import socket
import struct
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.errors import UsageError
from scalelab.records.files import pack_runs
from scalelab.records.store import RunStore
from scalelab.records.trial import Status
from scalelab.serve.server import MOST_CLIENTS, PageServer

HOSTILE = "<script>alert('x')</script>"


class Client:
    """Asks a server, with any headers."""

    def __init__(self, server: PageServer) -> None:
        self.port = int(server.server_address[1])

    def ask(
        self,
        path: str,
        *,
        host: str | None = None,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        body: str = "",
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True)
            connection.putheader("Host", host or f"127.0.0.1:{self.port}")
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            connection.endheaders(body.encode() or None)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace"), dict(answer.getheaders())
        finally:
            connection.close()

    def read(self, path: str) -> object:
        status, body, _ = self.ask(path)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one complete, one in which a trial failed in hostile words, one that was cut short."""
    place = tmp_path_factory.mktemp("served") / "runs"
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
    run_study(study, runs_dir=place, launcher=FakeLauncher(lambda trial: 1.0 / trial.num_ranks))
    failing = FakeLauncher(lambda trial: 1.0, failures={"ddp-2": Status.CRASHED})
    second, _ = run_study(study, runs_dir=place, launcher=failing)
    for name in second.record.trials:
        result = second.result(name)
        if result.status is Status.CRASHED:
            second.save_result(replace(result, reason=HOSTILE))
    third, _ = run_study(study, runs_dir=place, launcher=FakeLauncher(lambda trial: 1.1 / trial.num_ranks))
    for number, name in enumerate(third.record.trials):
        if number < 3:
            third.save_result(replace(third.result(name), wall_seconds=2.0 + number))
        else:
            (third.trial_directory(name) / "result.json").unlink()
    hostile = place / (third.name + "-" + HOSTILE.replace("/", "⁄") + "x" * 150)
    third.path.rename(hostile)
    (place.parent / "secret.txt").write_text("secret")
    (place / "outside").symlink_to(place.parent)
    return place


@pytest.fixture
def client(server: PageServer) -> Client:
    return Client(server)


def find_names(client: Client, words: str = "") -> list[str]:
    listed = client.read(f"/api/runs?q={quote(words)}")
    assert isinstance(listed, dict)
    return [run["name"] for run in listed["runs"]]


def test_runs_are_listed_newest_first_and_found_by_words(client: Client) -> None:
    listed = client.read("/api/runs")
    assert isinstance(listed, dict)
    assert listed["num_runs"] == 3
    assert listed["num_trials"] == sum(run["num_trials"] for run in listed["runs"])
    assert [run["state"].split(",")[0] for run in listed["runs"]] == ["interrupted", "complete", "complete"]
    assert len(find_names(client, "strong interrupted")) == 1
    assert find_names(client, "no such thing") == []


def test_a_run_tells_how_far_it_is_and_what_it_says_so_far(client: Client) -> None:
    (name,) = find_names(client, "interrupted")
    watch = client.read(f"/api/run/{quote(name, safe='')}")
    assert isinstance(watch, dict)
    assert (watch["line"]["num_done"], watch["line"]["num_failed"]) == (3, 0)
    assert watch["seconds_left"] is None
    assert any("trials have not run yet" in caution for caution in watch["cautions"])


def test_a_failed_trial_is_among_the_trials_with_its_files(client: Client) -> None:
    (name,) = find_names(client, "failed")
    trials = client.read(f"/api/trials/{name}")
    assert isinstance(trials, dict)
    failed = next(trial for trial in trials["trials"] if trial["status"] not in ("completed", "waiting"))
    found = client.read(f"/api/files/{name}/{failed['name']}")
    assert isinstance(found, dict)
    assert "result.json" in found["files"]
    status, body, headers = client.ask(f"/files/{name}/trials/{failed['name']}/result.json")
    assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert json.loads(body)["reason"] == HOSTILE


def test_reports_come_with_words_as_text(client: Client) -> None:
    (name,) = find_names(client, "interrupted")
    status, body, _ = client.ask(f"/report/{quote(name, safe='')}")
    assert status == 200
    assert HOSTILE.split("/")[0] not in body
    assert "Strong scaling" in body


def test_two_runs_become_a_comparison(client: Client) -> None:
    first, second = find_names(client, "complete")
    status, body, _ = client.ask(f"/report?a={first}&b={second}")
    assert status == 200
    assert "Comparison" in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1", "127.0.0.1.evil.example:1"])
def test_a_foreign_host_is_refused(client: Client, host: str) -> None:
    assert client.ask("/", host=host or " ")[0] == 403
    assert client.ask("/api/runs", host=host or " ")[0] == 403


def test_local_names_are_answered(client: Client) -> None:
    assert client.ask("/", host=f"localhost:{client.port}")[0] == 200


def test_two_thousand_headers_or_a_long_line_do_not_end_the_server(client: Client) -> None:
    assert client.ask("/" + "a" * 70_000)[0] == 414
    assert client.ask("/report?" + "run=x&" * 2_000)[:2] == (400, "an address has at most 1000 fields\n")
    assert client.ask("/api/runs?q=" + "%20".join(["x"] * 5_000))[0] == 200
    assert client.ask("/api/runs?from=99999999999999999999&q=%ff%00")[0] == 200
    assert client.ask("/api/runs")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/files/../secret.txt",
        "/files/%2e%2e/secret.txt",
        "/files/..%2fsecret.txt/x",
        "/files/outside/secret.txt",
        "/files/RUN/../../secret.txt",
        "/files/RUN/%2e%2e/%2e%2e/secret.txt",
        "/files/RUN/..%2f..%2fsecret.txt",
        "/files/RUN/%2fetc%2fpasswd",
        "/files/RUN/run.json%00.txt",
        "/files/RUN/trials",
        "/report/..",
        "/report/outside",
        "/api/run/%2e%2e",
        "/api/files/RUN/..%2f..",
        "/assets/../server.py",
        "/nothing",
    ],
)
def test_nothing_outside_of_the_runs_is_shown(client: Client, path: str) -> None:
    name = find_names(client, "complete")[0]
    status, body, _ = client.ask(path.replace("RUN", name))
    assert status == 404
    assert "secret" not in body
    assert "root:" not in body


def test_a_link_inside_of_a_run_that_leads_out_is_not_followed(client: Client, runs_dir: Path) -> None:
    name = find_names(client, "complete")[0]
    link = runs_dir / name / "leak.txt"
    link.symlink_to(runs_dir.parent / "secret.txt")
    try:
        assert client.ask(f"/files/{name}/leak.txt")[0] == 404
    finally:
        link.unlink()


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client: Client, method: str) -> None:
    assert client.ask("/api/runs", method=method)[0] == 501


def test_a_post_changes_tags_only(client: Client) -> None:
    for path in ("/", "/api/runs", "/api/run/x", "/files/x/run.json"):
        assert client.ask(path, method="POST")[0] == 405


def put_tags(client: Client, name: str, body: str, **headers: str) -> int:
    own = {
        "Origin": f"http://127.0.0.1:{client.port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body.encode())),
    }
    return client.ask(f"/api/tags/{quote(name, safe='')}", method="POST", headers=own | headers, body=body)[0]


def test_tags_are_kept_with_the_run_and_found(client: Client, runs_dir: Path) -> None:
    name = find_names(client, "complete")[0]
    try:
        assert put_tags(client, name, json.dumps([" good ", "base\nline", "good", ""])) == 200
        assert json.loads((runs_dir / name / "tags.json").read_text()) == ["good", "base line"]
        assert find_names(client, "base line") == [name]
        listed = client.read("/api/runs?tag=good")
        assert isinstance(listed, dict)
        assert ([run["name"] for run in listed["runs"]], listed["choices"]["tag"]) == ([name], ["base line", "good"])
    finally:
        (runs_dir / name / "tags.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("[]", {"Origin": "http://evil.example"}, 403),
        ("[]", {"Origin": "null"}, 403),
        ("[]", {"Content-Type": "text/plain"}, 400),
        ("[]", {"Content-Length": "999999"}, 400),
        ("{}", {}, 400),
        ("[1]", {}, 400),
        ("[", {}, 400),
        (json.dumps(["x" * 41]), {}, 409),
        (json.dumps([str(number) for number in range(21)]), {}, 409),
    ],
)
def test_tags_of_others_and_odd_ones_are_refused(
    client: Client, runs_dir: Path, body: str, headers: dict[str, str], status: int
) -> None:
    name = find_names(client, "complete")[0]
    assert put_tags(client, name, body, **headers) == status
    assert not (runs_dir / name / "tags.json").exists()
    assert put_tags(client, "..", "[]") == 404


def test_runs_are_selected_by_study_workload_host_and_day(client: Client) -> None:
    def count(query: str) -> int:
        listed = client.read(f"/api/runs?{query}")
        assert isinstance(listed, dict)
        return int(listed["num_runs"])

    listed = client.read("/api/runs")
    assert isinstance(listed, dict)
    one = listed["runs"][0]
    assert listed["choices"]["study"] == ["strong-scaling"]
    for name in ("study", "workload", "host"):
        assert count(f"{name}={quote(one[name])}") == 3
        assert count(f"{name}=other") == 0
    day = one["created_at"][:10]
    assert (count(f"since={day}&until={day}"), count("until=2001-01-01"), count("since=2999-01-01")) == (3, 0, 0)


def test_three_runs_become_one_comparison(client: Client) -> None:
    query = "&".join(f"run={quote(name, safe='')}" for name in find_names(client))
    assert "Comparison" in client.ask(f"/report?{query}")[1]
    assert client.ask("/report?" + "&".join(["run=x"] * 51))[0] == 400


def test_a_trend_has_the_runs_of_one_configuration(client: Client) -> None:
    name = find_names(client, "complete")[-1]
    status, body, _ = client.ask(f"/report-trend/{name}")
    assert status == 200
    assert "Step time over runs" in body
    assert body.count(f"{name}</th>") == 4  # plain loop, control, ddp on 1 and 2 ranks
    assert client.ask("/report-trend/outside")[0] == 404
    assert client.ask("/report-trend/..")[0] == 404


def test_a_link_to_elsewhere_is_not_packed_into_a_report(client: Client, runs_dir: Path) -> None:
    name = find_names(client, "complete")[0]
    store = RunStore.open(runs_dir / name)
    leaks = (store.path / "origin.json", store.trial_directory(store.record.trials[0]) / "fetches.csv")
    kept = leaks[0].read_bytes()
    try:
        for leak in leaks:
            leak.unlink(missing_ok=True)
            leak.symlink_to(runs_dir.parent / "secret.txt")
        packed = pack_runs([store.path]).content
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            assert archive.namelist()
            assert all(b"secret" not in archive.read(member)[:6] for member in archive.namelist())
            assert not any(member.endswith("fetches.csv") for member in archive.namelist())
    finally:
        for leak in leaks:
            leak.unlink()
        leaks[0].write_bytes(kept)


def test_a_client_that_drips_or_says_nothing_is_let_go(runs_dir: Path, server: PageServer) -> None:
    hasty = PageServer(server.library, 0, head_seconds=0.3)
    thread = hasty.serve_beside()
    try:
        port = int(hasty.server_address[1])
        silent, dripping = (socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(2))
        dripping.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1")
        assert silent.recv(1) == b""
        assert dripping.recv(1) == b""
        silent.close()
        dripping.close()
        assert Client(hasty).ask("/api/runs")[0] == 200
    finally:
        hasty.shutdown()
        thread.join()
        hasty.server_close()


def test_headers_without_end_are_refused(client: Client) -> None:
    many = {f"X-{number}": "x" for number in range(150)}
    assert client.ask("/api/runs", headers=many)[0] == 431
    assert client.ask("/api/runs", headers={"X": "x" * 70_000})[0] == 431


def test_a_hundred_clients_at_once_are_answered_and_more_are_turned_away(client: Client, server: PageServer) -> None:
    name = find_names(client, "complete")[0]
    with ThreadPoolExecutor(100) as pool:
        asked = [pool.submit(client.ask, f"/report/{name}" if number % 2 else "/api/runs") for number in range(100)]
        assert {one.result()[0] for one in asked} == {200}
    waiting = [socket.create_connection(("127.0.0.1", client.port), timeout=30) for _ in range(MOST_CLIENTS)]
    try:
        deadline = time.monotonic() + 30
        while server.num_clients < MOST_CLIENTS and time.monotonic() < deadline:
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", client.port), timeout=30) as turned:
            assert turned.recv(1) == b""
    finally:
        for one in waiting:
            one.close()


def test_no_answer_may_be_read_or_run_by_others(client: Client) -> None:
    for path in ("/", "/api/runs", "/assets/page.js"):
        _, _, headers = client.ask(path)
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in client.ask("/")[2]["Content-Security-Policy"]


def test_a_head_has_no_body(client: Client) -> None:
    status, body, headers = client.ask("/", method="HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 0


def test_a_damaged_run_is_a_line_and_an_answer(client: Client, runs_dir: Path) -> None:
    broken = runs_dir / "2020-01-01-0000-broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    try:
        assert find_names(client, "damaged") == [broken.name]
        watch = client.read(f"/api/run/{broken.name}")
        assert isinstance(watch, dict)
        assert watch["problem"]
        assert client.ask(f"/report/{broken.name}")[0] == 409
    finally:
        (broken / "run.json").unlink()
        broken.rmdir()


def test_a_running_study_tells_its_current_trial_and_the_time_left(client: Client, runs_dir: Path) -> None:
    (name,) = find_names(client, "interrupted")
    store = RunStore.open(runs_dir / name)
    with store.claim():
        watch = client.read(f"/api/run/{quote(name, safe='')}")
    assert isinstance(watch, dict)
    assert watch["line"]["state"] == "running"
    assert watch["current"] == store.record.trials[3]
    assert watch["elapsed_seconds"] >= 0
    assert watch["seconds_left"] == pytest.approx(3.0 * (len(store.record.trials) - 3))


def test_a_port_that_is_taken_is_named(server: PageServer, runs_dir: Path) -> None:
    with pytest.raises(UsageError, match=f"--port {server.server_address[1]} is not available"):
        PageServer(server.library, int(server.server_address[1]))


def test_a_client_that_leaves_is_not_reported_and_the_next_is_answered(
    client: Client, capsys: pytest.CaptureFixture[str], server: PageServer
) -> None:
    for number in range(20):
        with socket.create_connection(("127.0.0.1", client.port)) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the end is a reset
            link.sendall(b"GET /api/runs HTTP/1.1\r\nHost: evil\r\n\r\n" * 5 if number % 2 else b"GET /")
    assert client.ask("/api/runs")[0] == 200
    try:
        raise ValueError("ours")
    except ValueError:
        server.handle_error(None, ("127.0.0.1", 0))
    err = capsys.readouterr().err
    assert err.count("Traceback") == 1
    assert "ValueError: ours" in err
