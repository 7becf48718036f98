"""python -m hybrid.generate as users run it: output, statistics, interruption, errors. And the cost of `import hybrid`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import hybrid
from conformance.support.devices import BACKENDS
from conformance.support.profile import LONG
from conformance.support.synthetic import tiny, write_hf
from hybrid import doctor, generate
from hybrid.devices.opening import NoDevice
from hybrid.kernels.vulkan.api import VulkanUnavailable
from hybrid.kernels.vulkan.kernel import kernels_digest
from hybrid.text.stops import StopFilter
from hybrid.text.tokenizer import StreamDecoder

PYTHON = [sys.executable, "-m"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny())


def test_import_loads_nothing_heavy():
    code = "import sys, hybrid; bad = {'numpy', 'vulkan', 'pydantic', 'gguf'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_text_streams_to_stdout_and_one_line_of_statistics_to_stderr(folder):
    command = [
        *PYTHON,
        "hybrid.generate",
        folder,
        "--device",
        "cpu",
        "--prompt",
        "the bee",
        "--max-tokens",
        "8",
        "--ignore-eos",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("the bee")
    assert done.stderr.startswith("cpu | prompt ") and done.stderr.count("\n") == 1
    for part in ("tok/s | generated 8", "first token", "B/s", "length"):
        assert part in done.stderr


def test_json_has_text_ids_and_counts(folder, capsys):
    options = ["--temperature", "0.8", "--top-k", "20", "--seed", "3", "--ignore-eos", "--max-tokens", "12"]
    assert (
        generate.main([str(folder), "--device", "cpu", "--prompt", "the", "--json", "--weights", "q8_0", *options]) == 0
    )
    out = json.loads(capsys.readouterr().out)
    assert out["tokens"] == len(out["ids"]) == 12 and out["finish"] == "length"
    assert out["precision"] == {"weights": ["q8_0"], "activations": ["q8_act"], "kv": ["f16"]}
    assert out["per_pass"]["submits"] == 1 and out["per_pass"]["allocations"] == out["per_pass"]["recordings"] == 0
    with hybrid.load(folder, device="cpu") as model:
        assert model.decode(out["ids"]) == out["text"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.slow
def test_trace_has_every_step_of_every_pass(folder, tmp_path, capsys, devices, backend):
    devices.get(backend)  # skips where there is no Vulkan
    trace = tmp_path / "t.json"
    assert (
        generate.main([str(folder), "--device", backend, "-n", "4", "--ignore-eos", "--stats", "--trace", str(trace)])
        == 0
    )
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    passes = [e for e in events if e["tid"] == 0]
    assert [e["name"].split(".")[1] for e in passes] == ["prefill", "decode", "decode", "decode"]
    assert sum(e["name"] == "blk.1.attention" for e in events) == 4
    assert all(e["dur"] >= 0 for e in events) and sum(e["dur"] for e in events if e["tid"]) > 0
    assert "precision: weights bf16; activations f32; kv f32" in capsys.readouterr().err


def test_auto_falls_back_to_the_cpu_with_a_message(folder, monkeypatch):
    def none(selector, **options):
        raise VulkanUnavailable(f"no {selector} here")

    monkeypatch.setattr("hybrid.kernels.vulkan.device.open_device", none)
    with hybrid.load(folder, device="auto") as model:
        assert "".join(model.generate("the", 2, ignore_eos=True)) and model.device == "cpu"
        assert model.stats.line().startswith("cpu (fallback) | ")
        assert "passed over: vulkan:gpu: no gpu here" in model.stats.reasons()
    with pytest.raises(NoDevice, match="vulkan:3: no 3 here"):
        hybrid.load(folder, device="vulkan:3")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_model_has_closed_its_device(folder, devices, backend):
    devices.get(backend)
    model = hybrid.load(folder, device=backend)
    assert len(model.logits([2, 5, 7])) == 3
    device = model.engine.device
    model.close()
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        device.read("logits")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_survives_wrong_arguments_and_generations_that_are_dropped_closed_or_crossed(folder, devices, backend):
    devices.get(backend)
    with hybrid.load(folder, device=backend) as model:
        truth = "".join(model.generate("the", 9, ignore_eos=True))
        wrong = [
            {"top_k": 2**40},
            {"top_k": 1.5},
            {"seed": 2**64},
            {"seed": 0.5},
            {"temperature": 1e39},
            {"max_tokens": 2.5},
            {"stop": [5]},
        ]
        for given in wrong:
            with pytest.raises(ValueError, match="must be"):
                model.generate("the", **given)
        with pytest.raises(TypeError, match="unknown option 'top_g'; did you mean 'top_"):
            model.generate("the", top_g=1)
        for ids in ([-1], [10**9], [1.5], ["a"], b"ab", None, 5, []):
            with pytest.raises(ValueError, match=r"token id|prompt is empty"):
                model.generate(ids)
            with pytest.raises(ValueError, match=r"token id|prompt is empty"):
                model.logits(ids)
        pieces = model.generate("the", 9, ignore_eos=True)
        begun = next(pieces)
        assert model.logits([2, 5]).shape[0] == 2  # takes a slot for as long
        assert begun + "".join(pieces) == truth
        crossed = [model.generate("the", 9, ignore_eos=True) for _ in range(2)]
        begun = [next(pieces) for pieces in crossed]
        assert [a + "".join(pieces) for a, pieces in zip(begun, crossed, strict=True)] == [truth, truth]
        next(pieces := model.generate("the", 9, ignore_eos=True))
        pieces.close()
        assert "".join(model.generate("the", 9, ignore_eos=True)) == truth
        next(pieces := model.generate("the", 9, ignore_eos=True))
        model.close()
        with pytest.raises(ValueError, match="this model is closed"):
            next(pieces)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Windows starts no process without a standard stream")
@pytest.mark.parametrize("closed", [0, 1, 2] if LONG else [int(kernels_digest(), 16) % 3])  # alternating
def test_a_closed_standard_stream_is_no_error(folder, closed):
    args = [sys.executable, "-m", "hybrid.generate", str(folder), "--device", "cpu", "-p", "-", "-n", "2"]
    done = subprocess.run(args, input=b"ab", capture_output=True, preexec_fn=lambda: os.close(closed))
    assert done.returncode == 0 and b"error" not in done.stdout + done.stderr, done


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Windows cannot send SIGINT to one process")
def test_ctrl_c_ends_with_statistics_and_130(folder):
    code = (
        "import hybrid.engine.runner as r, sys, time; old = r.Runner.tokens\n"
        "def slow(*a): time.sleep(0.05); return old(*a)\n"
        "r.Runner.tokens = slow\nfrom hybrid.generate import main; sys.exit(main(sys.argv[1:]))"
    )
    args = [sys.executable, "-c", code, str(folder), "--device", "cpu", "-p", "ab ab", "-n", "200", "--ignore-eos"]
    process = subprocess.Popen(
        args,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a job with & ignores it
    assert process.stdout.read(6)  # the prompt and the first piece
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"cancelled" in error and b"Traceback" not in error and error.count(b"\n") == 1


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["/no/such.gguf"], 1, "/no/such.gguf: no such file or directory"),
        (["{model}", "--device", "tpu"], 1, "unknown device 'tpu': use auto"),
        (["{model}", "--device", "vulkan:77"], 1, "vulkan:77"),
        (["{model}", "--schedule", "missing.toml"], 1, "missing.toml: neither a file nor a shipped schedule"),
        (["{model}", "--temperature", "-1"], 2, "temperature must be 0"),
        (["{model}", "--temperature", "1e39"], 2, "finite in float32"),
        (["{model}", "--top-k", "4294967296"], 2, "top_k must be between 0 (off) and 2**32 - 1"),
        (["{model}", "--trace", "/"], 2, "--trace /: Is a directory"),
        (["{model}", "--top-p", "0"], 2, "top_p must be above 0"),
        (["{model}", "--temperature", "nan"], 2, "temperature must be 0"),
        (["{model}", "--seed", "-1"], 2, "seed must be between 0"),
        (["{model}", "--repetition-penalty", "0"], 2, "repetition_penalty must be between 0.01 and 100"),
        (["{model}", "--logit-bias", "7"], 2, "'7': write ID=B, a token id and a number"),
        (["{model}", "--logit-bias", "7=1000"], 2, "logit_bias must have biases between -100 and 100"),
        (["{model}", "--logit-bias", "99999=1"], 1, "logit_bias: the model has no token 99999"),
        (["{model}", "--max-tokens", "0"], 2, "'0' is not a positive number"),
        (["{model}", "--slots", "0"], 2, "'0' is not a positive number"),
        (["{model}", "--ctx", "0"], 2, "'0' is not a positive number"),
        (["{model}", "--system", "x"], 2, "--system belongs to --chat"),
        (["gemma3:4b"], 1, "a model is a .gguf file, a Hugging Face directory"),
        (["{model}", "--precision", "exakt"], 2, "argument --precision: invalid choice: 'exakt'"),
        (["{model}", "--weights", "q5_k"], 2, "argument --weights: invalid choice: 'q5_k'"),
        (["{model}", "--ctx", "9999"], 1, "ctx 9999 is outside 1..256"),
        (["{model}", "--stop", ""], 2, "a stop string is empty"),
        (["{model}", "--prompt", "ab " * 300], 1, "leaves no room in the context of 256"),
        (["{model}", "--trace", "/no/folder/t.json"], 2, "No such file or directory: name a file"),
        (["{model}", "--max-tokens", "none"], 2, "is not a positive number"),
        (["{model}", "--colour"], 2, "unrecognized arguments: --colour"),
    ],
)
def test_errors_are_one_line(folder, capsys, args, code, message):
    given = [a.replace("{model}", str(folder)) for a in args]
    if "--device" not in given:
        given += ["--device", "cpu"]
    try:
        got = generate.main(given)
    except SystemExit as e:
        got = e.code
    error = capsys.readouterr().err
    assert got == code and message in error and error.count("\n") == 1 and error.startswith("error: "), error


def test_penalties_and_biases_reach_the_model(folder, capsys):
    """The command and Model.generate sample the same tokens, which differ from those without penalties."""
    options = [
        "--repetition-penalty",
        "1.8",
        "--presence-penalty",
        "0.5",
        "--frequency-penalty",
        "0.25",
        "--logit-bias",
        "9=5",
    ]
    said = []
    for more in (options, []):
        assert generate.main([str(folder), "--device", "cpu", "--ignore-eos", "-n", "12", "--json", *more]) == 0
        said.append(json.loads(capsys.readouterr().out)["ids"])
    with hybrid.load(folder, device="cpu") as model:
        prompt = model.encode(generate.DEFAULT_PROMPT)
        "".join(
            model.generate(
                prompt,
                12,
                ignore_eos=True,
                repetition_penalty=1.8,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                logit_bias={9: 5},
            )
        )
        assert list(model.stats.ids) == said[0] != said[1]


def test_generation_ends_where_it_should(folder):
    with hybrid.load(folder, device="cpu", ctx=24) as model:
        ids = model.encode("the the")
        text = "".join(model.generate(ids, 64, ignore_eos=True))
        assert model.stats.finish == "context" and model.stats.tokens == 24 - len(ids)
        assert text == model.decode(model.stats.ids)
        for n in (1, 5, len(text) - 2):
            stop = text[n : n + 2]
            cut = "".join(model.generate(ids, 64, ignore_eos=True, stop=[stop, "\0"]))
            assert cut == text[: text.find(stop)] and model.stats.finish == "stop"
        first = next(iter(model.generate(ids, 64, ignore_eos=True)))  # a dropped generator gives its slot back
        assert model.stats.finish == "cancelled" and text.startswith(first)
    with pytest.raises(ValueError, match="this model is closed"):
        model.generate("x")


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["abc", "bc", "c"], ["\u00e9"]])
def test_stop_filter_cuts_as_if_the_text_were_whole(stops):
    for text in ("aababcabc", "xyz", "aaaa", "ca\u00e9b", ""):
        want = min((text.find(s) for s in stops if s in text), default=len(text))
        for size in (1, 2, 3):
            f = StopFilter(stops)
            out = "".join(f.push(text[i : i + size]) for i in range(0, len(text), size)) + f.flush()
            assert out == text[:want]


def test_pieces_never_split_a_character(folder):
    with hybrid.load(folder, device="cpu") as model:
        tokenizer = model.checkpoint.tokenizer
        for raw in ("h\u00e9 \U0001f600!".encode(), b"\xff\xc3", b"\xf0\x9f\x98", b"a\xe2\x82b"):
            ids = [tokenizer.token_id(f"<0x{b:02X}>") or 13 + b for b in raw]
            decoder = StreamDecoder(tokenizer)
            pieces = [decoder.push(i) for i in ids] + [decoder.flush()]
            assert "".join(pieces) == model.decode(ids) == raw.decode("utf-8", "replace")


def test_doctor_reports_and_exits_by_what_is_there(capsys):
    code = doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == int(not report["ok"])
    areas = {f["area"] for f in report["findings"]}
    assert {"python", "vulkan", "npu", "host", "models"} <= areas
    assert all(f["fix"] for f in report["findings"] if f["state"] == "missing")
