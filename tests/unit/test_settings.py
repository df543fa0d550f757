"""Settings: a file is either what its operator meant, or an error that says where and what would be right."""

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.errors import InvalidInput, NotFound, Problem
from autotuner.settings import (
    DAYS,
    ENV_VAR,
    Slot,
    Window,
    find_settings,
    load_policies,
    load_settings,
    read_source,
)

GOOD = """\
state_dir = "state"

[slots.kimi]
port = 30000
gpus = [0, 1]
benchmark = "chat"

[slots.other]
port = 30001
gpus = [2]
benchmark = "code"

[slots.other.objective]
level = 8

[benchmarks.chat]
levels = [1, 128]

[benchmarks.code]
levels = [8]

[objective]
level = 128
"""
MONDAY = dt.datetime(2026, 2, 23, tzinfo=dt.UTC)


def write(folder: Path, text: str) -> Path:
    path = folder / "autotuner.toml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> list[Problem]:
    with pytest.raises(InvalidInput) as caught:
        load_settings(write(folder, text))
    return caught.value.problems


def only(folder: Path, text: str) -> str:
    (problem,) = problems(folder, text)
    return str(problem).removeprefix(str(folder) + "/")


# --- the file


def test_a_good_file_is_read_with_its_paths_beside_it(tmp_path: Path) -> None:
    found = load_settings(write(tmp_path, GOOD))
    assert found.state_dir == tmp_path / "state"
    assert found.database == tmp_path / "state" / "state.db"
    assert found.lock_file == tmp_path / "state" / "daemon.lock"
    assert found.journal == tmp_path / "state" / "journal"
    assert found.launches == tmp_path / "state" / "launches"
    assert found.objective_of("kimi").level == 128
    assert found.objective_of("other").level == 8
    assert found.benchmark_name("kimi") == "chat"
    assert found.benchmark_name("kimi", "code") == "code"


def test_every_path_is_taken_from_the_files_folder_and_an_absolute_one_as_it_is(tmp_path: Path) -> None:
    text = 'state_dir = "/var/lib/a"\njournal_dir = "j"\nlog_dir = "~/logs"\npolicies_dir = "p"\n[slots.a]\nport = 1\n'
    found = load_settings(write(tmp_path, text))
    assert found.state_dir == Path("/var/lib/a")
    assert found.journal == tmp_path / "j"
    assert found.launches == Path("~/logs").expanduser()
    assert found.policies_dir == tmp_path / "p"


def test_a_short_file_is_enough(tmp_path: Path) -> None:
    found = load_settings(write(tmp_path, 'state_dir = "s"\n[slots.a]\nport = 1\n'))
    assert found.benchmark_name("a") == "default"
    assert found.window_closed(MONDAY) == ""
    assert found.restore == "idle"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[slots.kimi]\n", "[slots.kimi]\nprot = 1\n", "autotuner.toml:4: slots.kimi.prot: unknown key (did you mean port?)"),
        ("state_dir", "stat_dir", "stat_dir: unknown key (did you mean state_dir?)"),
        ("port = 30000", 'port = "x"', "autotuner.toml:4: slots.kimi.port: input should be a valid integer"),
        ("port = 30000", "port = 70000", "autotuner.toml:4: slots.kimi.port: input should be less than or equal to 65535"),
        ("port = 30001", "port = 30000", "autotuner.toml:9: slots.other.port: slots kimi and other share port 30000"),
        ("gpus = [2]", "gpus = [1]", "autotuner.toml:10: slots.other.gpus: slots kimi and other share GPU 1"),
        ('benchmark = "chat"', 'benchmark = "chut"', "autotuner.toml:6: slots.kimi.benchmark: there is no benchmark chut (known: chat, code)"),
        ("level = 128", "level = 64", "autotuner.toml:23: objective.level: the benchmark of slot kimi has no level 64 (levels: 1, 128)"),
        ("level = 8\n", "level = 9\n", "autotuner.toml:14: slots.other.objective.level: the benchmark of slot other has no level 9"),
        ("level = 8\n", 'maximise = "geometric_mean"\nweights = { 1 = 1.0 }\n',
         "autotuner.toml:15: slots.other.objective.weights.1: the benchmark of slot other has no level 1"),
        ("level = 8\n", "constraints.single_stream_ratio_min = 0.9\n",
         "autotuner.toml:14: slots.other.objective.constraints.single_stream_ratio_min: the benchmark of slot other has no level 1"),
        ("level = 128", 'maximise = "goodput"\nlevel = 128', 'autotuner.toml:23: objective.maximise: "goodput" needs ttft_ms_max or tpot_ms_max'),
        ("level = 128", "ttft_ms_max = 500", 'autotuner.toml:23: objective.ttft_ms_max: is for maximise = "goodput"; a limit that'),
        ("level = 8\n", "tpot_ms_max = 50\n", "autotuner.toml:14: slots.other.objective.tpot_ms_max: is for maximise"),
        ("level = 8\n", 'maximise = "goodput"\nttft_ms_max = 500\nlevel = 9\n',
         "autotuner.toml:16: slots.other.objective.level: the benchmark of slot other has no level 9"),
        ("level = 128", 'maximise = "goodput"\nttft_ms_max = 0', "autotuner.toml:24: objective.ttft_ms_max: input should be greater than 0"),
        ("level = 128", 'level = 128\nmaximise = "geometric_mean"', "autotuner.toml:23: objective.level: is for"),
        ("level = 128", "constraints.answers_agree_min = 25",
         "autotuner.toml:23: objective.constraints.answers_agree_min: input should be less than or equal to 1"),
        ("level = 128", "constraints.answer_agree_min = 0.5", "unknown key (did you mean answers_agree_min?)"),
        ("levels = [8]", "levels = [8, 8]", "autotuner.toml:20: benchmarks.code.levels: levels must all differ"),
        ("levels = [8]", "levels = [0]", "autotuner.toml:20: benchmarks.code.levels: levels must be above 0"),
        ("level = 128", 'maximise = "tok"', "autotuner.toml:23: objective.maximise: 'tok' is not one of them"),
        ("level = 128", "level = 128\n[budget]\ngpu_hours = 0", "autotuner.toml:25: budget.gpu_hours: input should be greater than 0"),
        ("level = 128", 'level = 128\n[[window]]\nfrom = "25:00"\nuntil = "08:00"', "autotuner.toml:25: window[0].from: string should match"),
        ("level = 128", 'level = 128\n[[window]]\nfrom = "22:00"', "autotuner.toml:24: window[0].until: is missing"),
        ("gpus = [2]", 'gpus = [2]\nsecret_files = { "A-B" = "/x" }', "autotuner.toml:11: slots.other.secret_files.A-B: is no variable name"),
        ("gpus = [2]", 'gpus = [2]\nclient_cores = "last"',
         "autotuner.toml:11: slots.other.client_cores: 'last' names no cores; accepted: \"auto\", \"off\""),
        ("[slots.kimi]", '[slots."a b"]', "autotuner.toml:3: slots.a b: string should match pattern"),
        ('state_dir = "state"', "state_dir = ", "autotuner.toml:1: not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_line_key_and_what_would_be_right(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert GOOD.count(old) >= 1
    found = [str(p).removeprefix(str(tmp_path) + "/") for p in problems(tmp_path, GOOD.replace(old, new, 1))]
    assert any(says in line for line in found), found


@pytest.mark.parametrize("text", ["", 'state_dir = "s"\n', 'state_dir = "s"\n[slots]\n'])
def test_a_file_without_a_slot_is_refused(tmp_path: Path, text: str) -> None:
    assert any(p.key == "slots" for p in problems(tmp_path, text))


def test_a_file_without_a_benchmark_is_refused(tmp_path: Path) -> None:
    assert "benchmarks" in only(tmp_path, 'state_dir = "s"\n[benchmarks]\n[slots.a]\nport = 1\n')


def test_a_message_does_not_repeat_what_may_be_a_secret(tmp_path: Path) -> None:
    text = 'state_dir = "s"\n[slots.a]\nport = 1\n[slots.a.secret_files]\nHF_TOKEN = 12345678\n'
    assert "12345678" not in only(tmp_path, text)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "autotuner.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_settings(path).slots["kimi"].port == 30000


def test_a_file_that_is_no_text_or_not_there_is_an_ordinary_error(tmp_path: Path) -> None:
    path = tmp_path / "autotuner.toml"
    path.write_bytes(b"a = 1\nb = \xff\n")
    with pytest.raises(InvalidInput, match=r"autotuner\.toml:2: is not UTF-8 text"):
        read_source(path)
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_source(tmp_path / "nothing.toml")
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        read_source(tmp_path)


def test_an_unknown_benchmark_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no benchmark called x; known: chat, code"):
        load_settings(write(tmp_path, GOOD)).benchmark_name("kimi", "x")


@pytest.mark.parametrize("listen", ["0.0.0.0", "", "127.0.0.1"])
def test_a_server_that_listens_everywhere_is_reached_on_the_loopback(listen: str) -> None:
    assert Slot(listen=listen, port=5).place.url == "http://127.0.0.1:5"
    assert Slot(listen="::1", port=5).place.url == "http://[::1]:5"


# --- where it is found


def test_the_named_file_comes_first_then_the_environment_then_the_usual_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, named, home = tmp_path / "here", tmp_path / "named.toml", tmp_path / "home"
    for folder in (here, home / ".config" / "autotuner"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv(ENV_VAR, raising=False)
    if not Path("/etc/autotuner/autotuner.toml").exists():
        with pytest.raises(NotFound, match=r"autotuner\.toml, ~/\.config"):
            find_settings(None)
    write(home / ".config" / "autotuner", GOOD)
    assert find_settings(None) == home / ".config" / "autotuner" / "autotuner.toml"
    write(here, GOOD)
    assert find_settings(None) == Path("autotuner.toml")
    named.write_text(GOOD)
    monkeypatch.setenv(ENV_VAR, str(named))
    assert find_settings(None) == named
    assert find_settings(str(here / "autotuner.toml")) == here / "autotuner.toml"
    with pytest.raises(NotFound, match="there is no settings file at"):
        find_settings(str(tmp_path / "nothing.toml"))


# --- policies of one's own


def test_policies_are_read_from_the_folder_that_is_named_in_the_order_of_their_names(tmp_path: Path) -> None:
    rule = 'description = "d"\n[[rule]]\nname = "r"\non = "window"\nwhen = "true"\naction = "abandon"\nsentence = "s"\n'
    folder = tmp_path / "p"
    folder.mkdir()
    for name in ("b.toml", "a.toml", "ignored.txt"):
        (folder / name).write_text(rule)
    found = load_settings(write(tmp_path, 'policies_dir = "p"\n' + GOOD))
    assert [p.file for p in load_policies(found)] == ["a.toml", "b.toml"]
    (folder / "a.toml").write_text("x = 1")
    (folder / "b.toml").write_text("x = 1")
    with pytest.raises(InvalidInput) as caught:
        load_policies(found)
    assert {p.file for p in caught.value.problems} == {"a.toml", "b.toml"}, "all files' problems at once"


def test_a_policies_folder_that_is_not_there_is_an_error_and_not_no_rules(tmp_path: Path) -> None:
    found = load_settings(write(tmp_path, 'policies_dir = "p"\n' + GOOD))
    with pytest.raises(NotFound, match="there is no policies folder"):
        load_policies(found)


# --- maintenance windows


def window(start: str, until: str, *days: Any) -> Window:
    return Window.model_validate({"from": start, "until": until, **({"days": days} if days else {})})


def at(day: int, clock: str) -> dt.datetime:
    hours, minutes = clock.split(":")
    return MONDAY + dt.timedelta(days=day, hours=int(hours), minutes=int(minutes))


@pytest.mark.parametrize(
    ("moment", "inside"),
    [(at(0, "21:59"), False), (at(0, "22:00"), True), (at(1, "05:59"), True), (at(1, "06:00"), False), (at(1, "23:00"), False), (at(0, "03:00"), False)],
)  # fmt: skip
def test_a_window_past_midnight_belongs_to_the_day_it_began_on(moment: dt.datetime, inside: bool) -> None:
    assert window("22:00", "06:00", "mon").contains(moment) is inside


def test_a_window_within_a_day_ends_before_its_end() -> None:
    noon = window("12:00", "13:00")
    assert [noon.contains(at(2, c)) for c in ("11:59", "12:00", "12:59", "13:00")] == [False, True, True, False]


def test_a_window_that_ends_when_it_begins_is_a_whole_day() -> None:
    always = window("00:00", "00:00")
    assert all(always.contains(at(d, c)) for d in range(7) for c in ("00:00", "12:34", "23:59"))
    whole = window("08:00", "08:00", "sat")
    assert (whole.contains(at(5, "07:59")), whole.contains(at(5, "08:00")), whole.contains(at(6, "07:59"))) == (
        False,
        True,
        True,
    )


@given(st.integers(0, 1439), st.integers(0, 1439), st.sets(st.sampled_from(DAYS), min_size=1), st.integers(0, 10079))
def test_a_window_is_the_stretch_of_the_week_that_it_names(start: int, end: int, days: set[Any], minute: int) -> None:
    found = window(f"{start // 60:02}:{start % 60:02}", f"{end // 60:02}:{end % 60:02}", *days)
    length = (end - start - 1) % 1440 + 1
    expected = any((minute - (DAYS.index(day) * 1440 + start)) % 10080 < length for day in days)
    assert found.contains(MONDAY + dt.timedelta(minutes=minute)) is expected


def test_a_closed_window_says_when_it_is_open(tmp_path: Path) -> None:
    text = (
        GOOD
        + '[[window]]\ndays = ["mon", "fri"]\nfrom = "22:00"\nuntil = "06:00"\n[[window]]\nfrom = "01:00"\nuntil = "02:00"\n'
    )
    found = load_settings(write(tmp_path, text))
    assert found.window_closed(at(0, "23:00")) == ""
    assert found.window_closed(at(2, "01:30")) == "", "one of them is enough"
    assert found.window_closed(at(2, "12:00")) == (
        f"outside the maintenance windows (mon/fri 22:00 to 06:00; {'/'.join(DAYS)} 01:00 to 02:00)"
    )


# --- budgets


def test_a_deadline_without_a_zone_is_the_hosts_local_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        local = load_settings(write(tmp_path, GOOD + "[budget]\ndeadline = 2026-02-23T08:00:00\n")).budget.deadline
        zoned = load_settings(
            write(tmp_path, GOOD + "[budget]\ndeadline = 2026-02-23T08:00:00+01:00\n")
        ).budget.deadline
    finally:
        monkeypatch.undo()
        time.tzset()
    assert local == dt.datetime(2026, 2, 23, 13, tzinfo=dt.UTC)
    assert zoned == dt.datetime(2026, 2, 23, 7, tzinfo=dt.UTC)


def test_no_budget_is_no_limit(tmp_path: Path) -> None:
    budget = load_settings(write(tmp_path, GOOD)).budget
    assert (budget.gpu_hours, budget.trials, budget.deadline) == (None, None, None)


# --- benchmarks whose levels are request rates

RATES = """\
state_dir = "state"
[slots.kimi]
port = 30000
[benchmarks.live]
load = "request-rate"
levels = [0.5, 2.0, 8]
seconds = 120
"""
GOODPUT = """\
[objective]
maximise = "goodput"
level = 0.5
ttft_ms_max = 500
"""


def test_a_benchmark_of_rates_with_a_goodput_objective_is_all_right(tmp_path: Path) -> None:
    found = load_settings(write(tmp_path, RATES + GOODPUT))
    assert found.benchmarks["live"].levels == (0.5, 2, 8)
    assert found.objective_in_words("kimi").startswith("goodput at 0.5 req/s")
    assert found.warnings == ()


def test_what_is_hardly_meant_is_warned_of_once(tmp_path: Path) -> None:
    text = RATES.replace("seconds = 120", "seconds = 40") + "[slots.other]\nport = 30001\n"
    output, few = load_settings(write(tmp_path, text)).warnings
    assert output.startswith("benchmark live sends requests at fixed rates")
    assert few == (
        "benchmark live sends about 20 requests in its 40 s at 0.5 req/s, too few to compare two servers by: "
        "set seconds to 60 or more, or take faster rates"
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[objective]\nlevel = 4\n", "objective.level: the benchmark of slot kimi has no level 4 (levels: 0.5, 2, 8)"),
        ('[objective]\nmaximise = "geometric_mean"\nweights = { "1.5" = 1 }\n', "has no level 1.5 (levels: 0.5, 2, 8)"),
        (
            "[objective.constraints]\nsingle_stream_ratio_min = 0.9\n",
            "needs concurrency 1, and the benchmark of slot kimi sends requests at rates",
        ),
    ],
)
def test_an_objective_that_a_benchmark_of_rates_cannot_have_is_refused(tmp_path: Path, more: str, says: str) -> None:
    assert says in only(tmp_path, RATES + more)


def test_weights_of_rates_are_written_as_keys_in_quotes(tmp_path: Path) -> None:
    more = '[objective]\nmaximise = "geometric_mean"\nweights = { "0.5" = 2, 8 = 1 }\n'
    assert load_settings(write(tmp_path, RATES + more)).objective.weights == {0.5: 2.0, 8: 1.0}


# --- hosts over SSH

PINNED = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDIKiIpGpLLeFwHnRTAGRIw+cCSrqcCAVUUiFnEuOeHm"
FAR = f'[hosts.far]\naddress = "10.0.0.7"\nuser = "ops"\nhost_key = "{PINNED} a comment"\nidentity_file = "keys/id"\n'


def test_a_slot_may_be_on_another_host_and_shares_nothing_with_one_here(tmp_path: Path) -> None:
    text = f'{GOOD}{FAR}[slots.there]\nhost = "far"\nport = 30000\ngpus = [0, 1]\nbenchmark = "chat"\n'
    settings = load_settings(write(tmp_path, text))
    [(name, far)] = settings.way_to("far")
    assert (name, far.host_key, far.identity_file) == ("far", (PINNED,), tmp_path / "keys/id")
    assert settings.url_of("there") == "http://127.0.0.1:30000 on host far"
    assert settings.url_of("kimi") == "http://127.0.0.1:30000"


@pytest.mark.parametrize(
    ("more", "line", "says"),
    [
        ('[slots.b]\nhost = "fra"\nport = 1\nbenchmark = "code"\n', 'host = "fra"', "there is no host fra"),
        (f'{FAR}jump = "gate"\n', 'jump = "gate"', "names gate, which is no host"),
        (f'{FAR}jump = "far"\n', 'jump = "far"', "leads back to it"),
        (FAR.replace("hosts.far", "hosts.local"), "[hosts.local]", "this machine"),
        (FAR.replace("identity_file", "# identity_file"), "[hosts.far]", "identity_file"),
        (f"{FAR}known_hosts = 'none'\n", "known_hosts", "known_hosts"),
        (
            f'{FAR}[slots.b]\nhost = "far"\nport = 1\nbenchmark = "code"\n[slots.c]\nhost = "far"\nport = 1\nbenchmark = "code"\n',
            "port = 1",
            "slots b and c share port 1",
        ),
    ],
)
def test_a_host_that_leads_nowhere_is_named_with_its_line(tmp_path: Path, more: str, line: str, says: str) -> None:
    found = problems(tmp_path, GOOD + more)
    assert says in "\n".join(map(str, found))
    assert any(problem.line and line in (GOOD + more).split("\n")[problem.line - 1] for problem in found), found


def test_the_way_to_a_host_goes_through_its_jump_hosts(tmp_path: Path) -> None:
    gate = FAR.replace("hosts.far", "hosts.gate")
    settings = load_settings(write(tmp_path, f'{GOOD}{gate}{FAR}jump = "gate"\n'))
    assert [name for name, _ in settings.way_to("far")] == ["gate", "far"]
    with pytest.raises(NotFound, match="known: gate, far"):
        settings.way_to("nowhere")
