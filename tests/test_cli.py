"""The command line as a person or a script meets it: what it prints, how it fails, and that options arrive."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from octavo import LLM, EngineConfig, ModelError, SamplingParams, cli
from octavo.cli import talk
from octavo.cli.options import NO_OPTIONS, as_option, parse_bytes, writable
from octavo.errors import ConfigError

POOL = ["--kv-cache-memory-bytes", "256MiB"]  # room for the model's whole context, 180 MiB


def octavo(*arguments: str | Path, stdin: str | bytes = b"") -> tuple[int, str, str]:
    """(exit status, standard output, standard error)"""
    command = [sys.executable, "-W", "error", "-m", "octavo", *map(str, arguments)]
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(command, input=data, capture_output=True, timeout=120, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model_path, kv_cache_memory_bytes=256 << 20) as llm:
        yield llm


# ── options ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Loaded(Exception):
    """Raised in place of loading a model, with what would have been loaded."""


def what_would_load(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[EngineConfig, SamplingParams]:
    """The configuration that `octavo ARGUMENTS` arrives at."""

    class Engine:
        def __init__(self, config: EngineConfig) -> None:
            self.config = config

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def stream(self, prompts: list[str], params: SamplingParams) -> None:
            raise Loaded(self.config, params)

    monkeypatch.setattr(talk, "_load", lambda model, config: Engine(config))
    monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
    with pytest.raises(Loaded) as caught:
        cli.main()
    config, params = caught.value.args
    return config, params


def test_without_options_the_fields_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    config, params = what_would_load(monkeypatch, "generate", "m", "hello")
    assert config == EngineConfig()
    assert params == SamplingParams(temperature=0.0, max_tokens=128, seed=0)


def test_every_option_reaches_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (
        "--block-size 32 --max-num-seqs 3 --max-num-batched-tokens 77 --scheduling-policy priority "
        "--kv-cache-memory-bytes 1.5GiB --no-enable-prefix-caching --max-model-len 99 --seed 12 --num-threads 1 "
        "--kv-cache-dtype fp8_e5m2 --kv-cache-dtype-skip-layers 0 --kv-cache-dtype-skip-layers 7 --backend reference "
        "--temperature 0.5 --top-p 0.25 --top-k 7 --min-p 0.125 "
        "--presence-penalty 1 --frequency-penalty -1 --repetition-penalty 1.5 --stop end --stop halt --stop-token-ids "
        "4 --stop-token-ids 5 --include-stop-str-in-output --min-tokens 2 --max-tokens 9 --ignore-eos --logprobs 3 "
        "--prompt-logprobs 1 --logit-bias 42=-1.5 --logit-bias 7=2 --beam-width 6 --length-penalty 0.5"
    )
    config, params = what_would_load(monkeypatch, "generate", "m", "hello", *options.split())
    wanted = EngineConfig(32, 3, 77, "priority", 3 << 29, False, 99, 12, 1, "fp8_e5m2", "reference")
    assert config == replace(wanted, kv_cache_dtype_skip_layers=(0, 7))
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=12,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        stop=("end", "halt"),
        stop_token_ids=(4, 5),
        include_stop_str_in_output=True,
        min_tokens=2,
        max_tokens=9,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=1,
        logit_bias={42: -1.5, 7: 2.0},
        beam_width=6,
        length_penalty=0.5,
    )


def test_every_field_has_an_option_that_says_what_it_does() -> None:
    _, text, _ = octavo("generate", "--help")
    options = re.split(r"^  (?=-)", text, flags=re.MULTILINE)[1:]
    for field in [*fields(EngineConfig), *fields(SamplingParams)]:
        if field.name in NO_OPTIONS:
            continue
        [option] = [one for one in options if f"--{field.name.replace('_', '-')} " in f"{one.split(chr(10))[0]} "]
        assert re.search(r"  \S+ \S+", option), option


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1048576),
        ("512MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("2 GiB", 2 << 30),
        ("1.5g", 3 << 29),
        ("8K", 8192),
        ("3kB", 3000),
        ("100b", 100),
        ("1T", 1 << 40),
    ],
)
def test_a_size_is_read_as_written(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3M", "1XB", "1e9", "nan", "9" * 400, "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_bytes(text)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["generate", "m", "hi", "--top-p", "3"], 2, "octavo: --top-p: must be a number above 0 to 1, got 3.0"),
        (["generate", "m", "hi", "--block-size", "3"], 2, "octavo: --block-size: must be 4, 8 or a multiple of 16"),
        (["generate", "m", "hi", "--logit-bias", "x"], 2, "octavo: --logit-bias: must look like 42=-1.5, got 'x'"),
        (["generate", "no/such.gguf", "hi"], 1, "octavo: no/such.gguf: "),
        (["generate", "nosuchmodel", "hi"], 1, "octavo: nosuchmodel: "),
        (["pull", "nosuchmodel"], 1, "octavo: nosuchmodel: "),
        (["generate", "m", "--file", "/no/such/file"], 2, "octavo: --file: /no/such/file cannot be read: "),
        (["chat", "nosuchmodel"], 1, "octavo: nosuchmodel: "),
    ],
)
def test_an_error_is_one_line_that_names_the_option(arguments: list[str], status: int, message: str) -> None:
    returned, out, err = octavo(*arguments)
    assert (returned, out) == (status, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_ctrl_c_while_the_command_line_is_loaded_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from octavo.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_ctrl_c_before_a_command_has_begun_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(["generate", "m", "--max-token", "3"], "--max-tokens"), (["genrate"], "generate")],
)
def test_a_misspelt_name_is_answered_with_the_nearest(arguments: list[str], nearest: str) -> None:
    status, _, err = octavo(*arguments)
    assert status == 2
    assert nearest in err


def test_names_of_options_are_told_as_they_are_typed_and_paths_as_they_are() -> None:
    assert as_option(ConfigError("swap_space", "is too much: lower swap_space or kv_offload_space.")) == (
        "--swap-space: is too much: lower --swap-space or --kv-offload-space."
    )
    for path in ("/data/max_num_seqs/x.gguf", "max_num_seqs.gguf", "'max_num_seqs'", "no_option"):
        assert as_option(ModelError(path, "cannot be read")) == f"{path}: cannot be read"


def test_a_request_that_can_never_fit_names_both_numbers(model_path: Path) -> None:
    status, out, err = octavo("generate", model_path, "hi", "--max-model-len", "64", "--max-tokens", "100", *POOL)
    assert (status, out) == (2, "")
    assert err.startswith("octavo: --max-tokens: ")
    assert "100" in err
    assert err.rstrip().endswith("64: ask for at most 63, or raise --max-model-len")


def test_a_prompt_that_is_not_text_is_refused(tmp_path: Path) -> None:
    status, _, err = octavo("generate", "m", stdin=b"\xff\xfe")
    assert status == 2
    assert "octavo: --file: - cannot be read" in err
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    status, _, err = octavo("generate", "m", "--file", empty)
    assert status == 2
    assert "has no line with a prompt" in err


def test_an_empty_standard_input_is_refused(model_path: Path) -> None:
    status, out, err = octavo("generate", model_path, *POOL)
    assert (status, out) == (2, "")
    assert err.startswith("octavo: prompt: is empty")


def test_a_fault_of_the_model_file_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    status, _, err = octavo("generate", broken, "hi")
    assert status == 1
    assert err.startswith(f"octavo: {broken}: ")
    assert err.count("\n") == 1


def test_the_version_and_help_need_no_model() -> None:
    assert octavo("--version") == (0, "octavo 0.1.0\n", "")
    status, out, _ = octavo("--help")
    assert status == 0
    assert re.findall(r"^  (\w+)  ", out, re.MULTILINE) == [
        "generate",
        "chat",
        "top",
        "serve",
        "pull",
        "plan",
        "simulate",
        "advise",
        "bench",
    ]


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *names, name)
    if not hasattr(group, "commands"):
        yield names, group


def test_files_that_cannot_be_written_are_told_before_anything_is_done(tmp_path: Path) -> None:
    whole = typer.main.get_command(cli.app)
    files = {"--json", "--html", "--png", "--plot", "--chrome-trace"}
    found = [
        (names, option)
        for names, command in commands(whole)
        for parameter in command.params
        for option in parameter.opts
        if option in files and not parameter.is_flag
    ]
    assert len(found) >= 15
    for names, option in found:
        for path, why in ((tmp_path / "none" / "it", "there is no directory"), (tmp_path, "is a directory")):
            result = CliRunner().invoke(cli.app, [*names, "x", option, str(path)])
            assert result.exit_code == 2 and f"'{option}'" in result.output and why in result.output, result.output
    assert writable(tmp_path / "new") == tmp_path / "new" and not (tmp_path / "new").exists()


# ── generate ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_prompt_prints_its_continuation_from_wherever_it_comes(model_path: Path, llm: LLM, tmp_path: Path) -> None:
    prompt = "The capital of France is"
    [output] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, seed=0))
    expected = (0, output.outputs[0].text + "\n", "")
    options = ["--max-tokens", "8", *POOL]
    assert " Paris" in output.outputs[0].text
    assert octavo("generate", model_path, prompt, *options) == expected
    assert octavo("generate", model_path, *options, stdin=prompt + "\n") == expected
    assert octavo("generate", model_path, "--file", "-", *options, stdin=f"\n{prompt}\n") == expected


def test_many_prompts_as_json_are_what_each_is_alone(model_path: Path, llm: LLM, tmp_path: Path) -> None:
    prompts = ["Water is made of", "One, two, three,", "Water is made of", "Ünïcödé 🚀"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts[2:]))
    options = ["--max-tokens", "6", "--temperature", "0.9", "--logprobs", "2", "--seed", "3", *POOL]
    status, out, err = octavo("generate", model_path, *prompts[:2], "--file", file, "--json", *options)
    assert (status, err) == (0, "")
    documents = json.loads(out)
    params = SamplingParams(temperature=0.9, max_tokens=6, logprobs=2, seed=3)
    for prompt, document in zip(prompts, documents, strict=True):
        [alone] = llm.generate(prompt, params)
        choice = alone.outputs[0]
        assert document["prompt"] == prompt
        assert document["prompt_token_ids"] == alone.prompt_token_ids
        assert document["outputs"][0]["token_ids"] == choice.token_ids
        assert document["outputs"][0]["text"] == choice.text
        assert document["outputs"][0]["finish_reason"] == choice.finish_reason
        scores = document["outputs"][0]["logprobs"]
        assert [
            {int(token): tuple(score.values()) for token, score in one.items()} for one in scores
        ] == choice.logprobs
        assert document["metrics"]["time_to_first_token_s"] > 0


def test_many_answers_are_printed_under_their_prompts(model_path: Path) -> None:
    options = ["-n", "2", "--max-tokens", "3", "--temperature", "1", *POOL]
    status, out, err = octavo("generate", model_path, "Once [b]upon", "A dog", *options)
    assert (status, err) == (0, "")
    assert re.fullmatch(r"Once \[b\]upon\n\[0\] .*\n\[1\] .*\n\nA dog\n\[0\] .*\n\[1\] .*\n\n", out, re.DOTALL)


def test_chat_puts_a_prompt_through_the_template(model_path: Path, llm: LLM) -> None:
    [answer] = llm.chat([{"role": "user", "content": "Name a colour."}], SamplingParams(temperature=0.0, max_tokens=6))
    status, out, _ = octavo("generate", model_path, "Name a colour.", "--chat", "--max-tokens", "6", *POOL)
    assert (status, out) == (0, answer.outputs[0].text + "\n")


# ── chat ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_piped_conversation_remembers_until_it_is_reset(model_path: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, top_p=0.9, max_tokens=16, seed=0)
    start = [{"role": "system", "content": "Be brief."}]

    def ask(messages: list[dict[str, str]], question: str) -> tuple[str, list[dict[str, str]]]:
        messages = [*messages, {"role": "user", "content": question}]
        text = llm.chat(messages, params)[0].outputs[0].text
        return text, [*messages, {"role": "assistant", "content": text}]

    first, after_first = ask(start, "My name is Ada.")
    remembered, _ = ask(after_first, "What is my name?")
    forgotten, _ = ask(start, "What is my name?")
    assert remembered != forgotten
    turns = "My name is Ada.\n\nWhat is my name?\n/reset\nWhat is my name?\n/quit\nNever answered.\n"
    options = ["--system", "Be brief.", "--temperature", "0", "--max-tokens", "16", *POOL]
    status, out, err = octavo("chat", model_path, *options, stdin=turns)
    assert (status, err) == (0, "")
    assert out == f"{first}\n{remembered}\n{forgotten}\n"


def test_a_turn_too_long_for_the_context_is_refused_and_the_conversation_goes_on(model_path: Path) -> None:
    turns = "word " * 100 + "\nHi\n"
    status, out, err = octavo("chat", model_path, "--max-model-len", "80", "--max-tokens", "4", *POOL, stdin=turns)
    assert status == 0
    assert "/reset begins anew" in err
    assert out.strip()


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(model_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "chat", str(model_path), "--ignore-eos", *POOL]
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=environment) as chat:
        os.close(side)
        try:
            read_until(main, "› ")
            os.write(main, b"Tell me a very long story.\n")
            read_until(main, " ", after="story.\r\n", at_least=40)
            chat.send_signal(signal.SIGINT)
            said = read_until(main, "› ")
            assert " …" in said
            assert "tokens" in said
            os.write(main, b"\x04")
            assert chat.wait(timeout=30) == 0
        finally:
            chat.kill()
            os.close(main)


def read_until(terminal: int, text: str, *, after: str = "", at_least: int = 0, within_s: float = 60.0) -> str:
    """What the terminal shows, up to and with `text`; not before `at_least` characters after `after` were seen."""
    raw, seen, end = b"", "", time.monotonic() + within_s
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            raw += os.read(terminal, 4096)
            seen = raw.decode("utf-8", "replace")
            rest = seen.partition(after)[2] if after else seen
            if len(rest) >= at_least and text in rest:
                return seen
    raise AssertionError(f"no {text!r} in {seen!r}")


# ── plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────

BIG = ["llama-3.1-70b", "--max-model-len", "4096", "--kv-cache-dtype", "fp16", "--lengths", "150,300"]


def test_a_plan_for_gpus_needs_no_model() -> None:
    devices = ["--gpu", "a100-80gb", "--gpu", "h200", "--memory", "96GB", "--tensor-parallel-size", "4"]
    status, text, err = octavo("plan", *BIG, *devices)
    assert (status, err) == (0, "")
    assert re.search(r"^a sequence of max_model_len +1,342,177,280 +1,342,177,280 +1,342,177,280$", text, re.MULTILINE)
    status, out, _ = octavo("plan", *BIG, *devices, "--json")
    found = json.loads(out)
    assert status == 0 and found["num_parameters"] == 70_553_706_496
    assert [plan["memory_bytes"] for plan in found["plans"]] == [320 * 10**9, 564 * 10**9, 384 * 10**9]
    for plan in found["plans"]:
        first, second = plan["rooms"]
        assert (first["pages"], second["tokens"], plan["kv_dtype"]) == (10, 300, "fp16")
        assert f"{plan['num_pages']:,}" in text and f"{first['gain']:.1f} ×" in text
        assert first["paged_at_once"] == plan["num_pages"] // 10


def test_a_plan_for_this_machine_is_its_pool(model_path: Path, llm: LLM) -> None:
    for model in ("smollm2-135m", model_path):
        status, out, _ = octavo("plan", model, "--json", *POOL)
        [plan] = json.loads(out)["plans"]
        assert status == 0
        assert {name: plan[name] for name in ("num_pages", "page_bytes", "token_bytes")} == {
            name: llm.stats()[name] for name in ("num_pages", "page_bytes", "token_bytes")
        }
        assert plan["weight_bytes"] < model_path.stat().st_size
        assert [room["tokens"] for room in plan["rooms"]] == [150, 300, 1024, 4096, 8192]


def test_known_models_and_gpus_are_listed() -> None:
    status, out, _ = octavo("plan", "--list")
    assert status == 0
    assert "llama-3.1-8b        8.03 billion parameters  (config.json of meta-llama/Llama-3.1-8B)\n" in out
    assert "h200              141 GB\n" in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "octavo: model: name one"),
        (["lama-3.1-70b"], 1, "octavo: lama-3.1-70b: is no file .* did you mean llama-3.1-70b"),
        ([*BIG, "--tensor-parallel-size", "2"], 2, "octavo: --tensor-parallel-size: needs --gpu or --memory"),
        ([*BIG, "--gpu", "t4", "--tensor-parallel-size", "3"], 2, "octavo: --tensor-parallel-size: 3 devices"),
        ([*BIG, "--gpu", "abacus"], 2, "octavo: --gpu: there is no 'abacus'"),
        ([*BIG, "--lengths", "1,x", "--gpu", "t4"], 2, "octavo: --lengths: must look like"),
        ([*BIG, "--lengths", "5000", "--gpu", "t4"], 2, "octavo: --lengths: 5,000 tokens"),
        ([*BIG, "--gpu", "t4", "--shared-tokens", "151"], 2, "octavo: --shared-tokens: 151 "),
        ([*BIG, "--gpu", "t4", "--weight-dtype", "int3"], 2, "octavo: --weight-dtype: must be one of"),
        ([*BIG, "--gpu", "t4", "--output-tokens", "0"], 2, "octavo: --output-tokens: must be a number"),
        (["llama-3.1-8b", "--shared-tokens", "9"], 2, "octavo: --shared-tokens: is a part of prompts"),
        (["llama-3.1-8b", "--measure"], 2, "octavo: --measure: goes with --page-sizes"),
        (["llama-3.1-8b", "--kv-cache-dtype", "fp12"], 2, "octavo: --kv-cache-dtype: must be "),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(arguments: list[str], status: int, message: str) -> None:
    returned, out, err = octavo("plan", *arguments)
    assert (returned, out) == (status, "")
    assert re.match(message, err)
    assert err.count("\n") == 1


def test_no_figure_is_cut_however_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ["l4", "h100", "a100-80gb", "h200", "B200", "mi300x"]
    status, out, _ = octavo("plan", "llama-3.1-8b", *(word for name in names for word in ("--gpu", name)))
    assert status == 0 and "…" not in out
    assert re.search(r"^weights +(16,060,522,496 *){6}$", out, re.MULTILINE)


def test_a_pool_beyond_the_memory_is_told() -> None:
    status, out, _ = octavo("plan", "smollm2-135m", "--kv-cache-memory-bytes", "100TB")
    assert status == 0 and out.endswith("Weights and pool are more than the memory.\n")


def test_an_encoder_has_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    status, out, err = octavo("plan", tmp_path)
    assert (status, out) == (1, "") and "bert is an encoder" in err


# ── pull ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pull_prints_the_path_alone(model_path: Path) -> None:
    assert octavo("pull", "smollm2-135m") == (0, f"{model_path}\n", "")
    status, out, _ = octavo("pull")
    assert status == 0
    assert out.startswith("smollm2-135m  ")


def test_other_failures_are_not_hidden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(model: str, config: EngineConfig) -> LLM:
        raise ModelError("file", "is odd")

    monkeypatch.setattr(talk, "_load", fail)
    monkeypatch.setattr(sys, "argv", ["octavo", "generate", "m", "hello"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    assert capsys.readouterr().err == "octavo: file: is odd\n"
    monkeypatch.setattr(talk, "_load", lambda model, config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main()
