"""A script's flags are read as a shell would pass them, and nothing is run."""

from pathlib import Path

import pytest

from rollfeed.compat.convert.shell_scripts import read_script
from rollfeed.errors import ConfigError


def flags_of(script: str, folder: Path = Path()) -> list[str]:
    return [word.text for word in read_script(script, source="run.sh", folder=folder).words]


def test_arrays_are_the_words_of_their_command() -> None:
    script = """
CKPT_ARGS=(
   --hf-checkpoint /models/base   # what is trained
   #--hf-checkpoint /models/other
)
ROLLOUT_ARGS=(--rollout-batch-size 32 --rollout-stop "a b" '$c')
ROLLOUT_ARGS+=(--rm-type math)
python3 train.py "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" ${NONE_ARGS[@]:-} 2>&1 | tee out.log
"""
    assert flags_of(script) == [
        *("--hf-checkpoint", "/models/base", "--rollout-batch-size", "32", "--rollout-stop", "a b", "$c"),
        *("--rm-type", "math"),
    ]


def test_a_command_goes_on_behind_a_backslash_and_ends_at_a_comment() -> None:
    script = "python train.py \\\n --rm-type math \\\n --num-rollout 3 \\\n # --rollout-seed 4 \\\n --rollout-seed 5\n"
    read = read_script(script, source="run.sh", folder=Path())
    assert [word.text for word in read.words] == ["--rm-type", "math", "--num-rollout", "3"]
    assert read.notes == [
        "run.sh:5: --rollout-seed is a command of its own; does a \\ miss, or a comment end the line?"
    ]


@pytest.mark.parametrize(
    ("before", "written", "passed"),
    [
        ("export N=3", "$N", ["3"]),
        ("N=3", '"${N}x"', ["3x"]),
        ("", "${ABSENT_N:-4}", ["4"]),
        ("N=", "${N:-4}", ["4"]),
        ("N=", "${N-4} 5", ["5"]),
        ("N=2 M=3", "$((N * M + 1))", ["7"]),
        ("local -r N=3; M=$N", "${M}", ["3"]),
        ("P=/a/b.jsonl", "${P##*/}", ["b.jsonl"]),
        ("NAMES=(a 'b c')", '"${NAMES[@]}"', ["a", "b c"]),
        ("NAMES=(a 'b c')", "${NAMES[1]}", ["b", "c"]),
        ('A="x y"', "$A", ["x", "y"]),
        ('A="x y"', '"$A"', ["x y"]),
        ("A=x; A+=y", "$A", ["xy"]),
        ("", '"say \\"hi\\""', ['say "hi"']),
        ("if [ 2 -gt 1 ]; then N=5; else N=6; fi", "$N", ["5"]),
        ('if [[ "$ABSENT_N" == "a" ]]; then N=5; elif [ -z "$ABSENT_N" ]; then N=6; else N=7; fi', "$N", ["6"]),
        ('[ -n "$ABSENT_N" ] && N=5 || N=6', "$N", ["6"]),
        ("case b in a) N=1 ;; b|c) N=2 ;; *) N=3 ;; esac", "$N", ["2"]),
        ("for N in 4 5; do :; done", "$N", ["4"]),
        ("cat <<'END' > x\n--rm-type bad\nEND\nN=3", "$N", ["3"]),
    ],
)
def test_what_a_shell_makes_of_a_word(before: str, written: str, passed: list[str]) -> None:
    assert flags_of(f"{before}\npython train.py --rollout-stop {written}\n") == ["--rollout-stop", *passed]


def test_scripts_beside_it_are_read_and_those_that_are_missing_noted(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.sh").write_text("MODEL_ARGS=(--rollout-seed 3)\n")
    script = (
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
        'source "${HERE}/models/base.sh"\nsource models/absent.sh\npython train.py ${MODEL_ARGS[@]} --rm-type math\n'
    )
    read = read_script(script, source="run.sh", folder=tmp_path)
    assert [word.text for word in read.words] == ["--rollout-seed", "3", "--rm-type", "math"]
    assert read.notes == ["run.sh:3: models/absent.sh is not here; what it sets is missing"]


def test_what_only_running_tells_stays_as_it_is_written_and_is_noted() -> None:
    read = read_script("python train.py --rollout-seed $(date +%s) --rm-url $ABSENT_URL", source="a.sh", folder=Path())
    assert [word.text for word in read.words] == ["--rollout-seed", "$(date +%s)", "--rm-url", "$ABSENT_URL"]
    assert len(read.notes) == 2


def test_the_command_with_most_flags_is_the_one_behind_a_launcher() -> None:
    script = (
        "ray start --head --num-gpus 8\nray job submit --address=http://127.0.0.1:8265 \\\n"
        "  --runtime-env-json='{\"env_vars\": {}}' \\\n  -- python3 train_async.py --rm-type math\n"
    )
    assert flags_of(script) == ["--rm-type", "math"]
    assert read_script(script, source="a.sh", folder=Path()).runs_async
    assert flags_of('ssh host "cd x && python3 train.py --rm-type math"') == ["--rm-type", "math"]
    assert flags_of("ROLLOUT_ARGS=(--rm-type math)\nEVAL_ARGS=(--eval-top-p 1)\n") == [
        *("--rm-type", "math"),
        *("--eval-top-p", "1"),
    ]


def test_a_function_is_followed_where_it_is_called() -> None:
    script = (
        'run() {\n  local extra=("$@")\n  python3 train.py "${ARGS[@]}" "${extra[@]}" --rollout-seed $2\n}\n'
        "function unused { python3 train.py --rm-type bad --num-rollout 1 --rollout-shuffle; }\n"
        'ARGS=(--rm-type math)\nARGS=("${ARGS[@]}" --rollout-top-p 0.9)\nrun --num-rollout 3\n'
    )
    assert flags_of(script) == [
        *("--rm-type", "math", "--rollout-top-p", "0.9", "--num-rollout", "3", "--rollout-seed", "3"),
    ]


def test_nothing_is_run(tmp_path: Path) -> None:
    flags_of(f"touch {tmp_path}/x\nA=$(touch {tmp_path}/y)\npython train.py --rm-type math `touch {tmp_path}/z`\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("A=1\nB='x\n", "run.sh:2: the ' is not closed"),
        ('A="x', 'run.sh:1: the " is not closed'),
        ("A=$(x", r"run.sh:1: the \( is not closed"),
        ("echo hello", "run.sh: there are no flags of slime's in it"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_with_its_line(script: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        flags_of(script)
