from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from rollfeed.errors import SandboxError
from rollfeed.protocols import ExecLimits, ExecOutcome, Isolation, IsolationLevel
from rollfeed.sandbox import LocalSandboxes, start_sandboxes

LIMITS = ExecLimits(wall_seconds=20.0)


async def test_files_stay_from_one_program_to_the_next_and_no_longer(sandboxes: LocalSandboxes) -> None:
    async with sandboxes.open() as sandbox:
        await sandbox.write("deep/in.txt", b"one\n")
        script = "cat deep/in.txt > out.txt; echo two >> out.txt; pwd; echo $HOME"
        result = await sandbox.exec(["sh", "-c", script], limits=LIMITS)
        assert (result.exit_code, result.stdout) == (0, b"/box\n/box\n")
        await sandbox.write("out2.txt", await sandbox.read("out.txt"))
        result = await sandbox.exec(["cat", "out2.txt"], limits=LIMITS)
        assert result.stdout == b"one\ntwo\n"
    async with sandboxes.open() as sandbox:
        with pytest.raises(SandboxError, match="cannot be read"):
            await sandbox.read("out.txt")


async def test_folders_that_are_asked_for_and_the_network_are_there_and_nothing_else(
    sandboxes: LocalSandboxes, tmp_path: Path
) -> None:
    own = LocalSandboxes(
        isolation=sandboxes.isolation,
        max_running=2,
        scratch=tmp_path / "scratch",
        places=("/home/mine", "/work", "/tmp"),
        has_network=True,
    )
    assert not own.isolation.network_cut
    async with own.open() as sandbox:
        await sandbox.write("work/deep/in.txt", b"one\n")
        script = (
            "pwd; cat /work/deep/in.txt; echo two > /tmp/out.txt; touch /work/deep/x /box/x /y; ls /proc/self/net/dev"
        )
        assert (await sandbox.exec(["sh", "-c", script], limits=LIMITS)).stdout.startswith(b"/home/mine\none\n")
        look = "import os, socket; print(*os.listdir('/work/deep'), len(socket.if_nameindex()))"
        seen = (await sandbox.exec(["python3", "-c", look], limits=LIMITS)).stdout.split()
        assert seen[:-1] in ([b"in.txt", b"x"], [b"x", b"in.txt"])
        assert int(seen[-1]) == len(socket.if_nameindex())
        assert await sandbox.read("tmp/out.txt") == b"two\n"


async def test_standard_input_output_and_exit_codes_are_passed(sandboxes: LocalSandboxes) -> None:
    async with sandboxes.open() as sandbox:
        result = await sandbox.exec(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"a" * 300_000, limits=LIMITS)
        assert (result.exit_code, result.stdout, result.stderr) == (7, b"a" * 300_000, b"err\n")
        result = await sandbox.exec(["sh", "-c", "kill -SEGV $$"], limits=LIMITS)
        assert result.exit_code == -11
        result = await sandbox.exec(["true"], stdin=b"not read" * 100_000, limits=LIMITS)
        assert result.exit_code == 0


@pytest.mark.parametrize("command", [["no-such-program"], ["/box/missing"], []])
async def test_a_program_that_is_not_there_is_no_result(sandboxes: LocalSandboxes, command: list[str]) -> None:
    async with sandboxes.open() as sandbox:
        with pytest.raises(SandboxError):
            await sandbox.exec(command, limits=LIMITS)


async def test_links_and_pipes_in_the_folder_lead_nowhere(sandboxes: LocalSandboxes, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("sesame")
    script = f"""
        ln -s {outside}/secret link; ln -s {outside} folder; mkfifo pipe; mkdir plain; ln -s / plain/up
        ln -s {outside}/made target; ln -s {outside} swapped
    """
    async with sandboxes.open() as sandbox:
        assert (await sandbox.exec(["sh", "-c", script], limits=LIMITS)).exit_code == 0
        for path in ("link", "folder/secret", "pipe", "plain", f"plain/up{outside}/secret", "missing"):
            with pytest.raises(SandboxError):
                await sandbox.read(path)
        await sandbox.write("target", b"replaces the link")
        assert await sandbox.read("target") == b"replaces the link"
        await sandbox.write("pipe", b"replaces the pipe")
        assert await sandbox.read("pipe") == b"replaces the pipe"
        with pytest.raises(SandboxError):
            await sandbox.write("swapped/made", b"x")
    assert sorted(os.listdir(outside)) == ["secret"]
    assert (outside / "secret").read_text() == "sesame"


@pytest.mark.parametrize("path", ["/etc/hostname", "../x", "a/../../x", "", ".", "a\0b"])
async def test_paths_that_leave_the_folder_are_refused(sandboxes: LocalSandboxes, path: str) -> None:
    async with sandboxes.open() as sandbox:
        with pytest.raises(SandboxError):
            await sandbox.read(path)
        with pytest.raises(SandboxError):
            await sandbox.write(path, b"")


async def test_files_that_are_too_large_are_not_read(sandboxes: LocalSandboxes) -> None:
    async with sandboxes.open() as sandbox:
        await sandbox.write("file", b"x" * 101)
        assert len(await sandbox.read("file", max_bytes=101)) == 101
        with pytest.raises(SandboxError, match="larger than 100"):
            await sandbox.read("file", max_bytes=100)


async def test_closed_folders_do_not_keep_a_sandbox_from_being_deleted(sandboxes: LocalSandboxes) -> None:
    async with sandboxes.open() as sandbox:
        script = "mkdir -p a/b/c; touch a/b/file; chmod 000 a/b/file a/b/c a/b a; chmod 000 ."
        assert (await sandbox.exec(["sh", "-c", script], limits=LIMITS)).exit_code == 0


@pytest.mark.parametrize(("name", "depth"), [("d" * 255, 40), ("d", 2_500)], ids=["long-names", "many"])
async def test_folders_too_deep_for_a_path_do_not_keep_a_sandbox_from_being_deleted(
    sandboxes: LocalSandboxes, name: str, depth: int
) -> None:
    program = """
import os, sys
for _ in range(int(sys.argv[2])):
    os.mkdir(sys.argv[1])
    os.chdir(sys.argv[1])
    open("file", "w").close()
    os.chmod(".", 0o300)
"""
    async with sandboxes.open() as sandbox:
        command = ["python3", "-I", "-S", "-c", program, name, str(depth)]
        result = await sandbox.exec(command, limits=ExecLimits(wall_seconds=20.0, max_files=10_000))
        assert result.outcome in (ExecOutcome.EXITED, ExecOutcome.FILE_LIMIT)
        assert result.exit_code in (0, None)


async def test_files_deeper_than_a_path_are_over_the_limit(sandboxes: LocalSandboxes) -> None:
    program = "import os, signal\nfor _ in range(30):\n    os.mkdir('d' * 255)\n    os.chdir('d' * 255)\nsignal.pause()"
    async with sandboxes.open() as sandbox:
        result = await sandbox.exec(["python3", "-I", "-S", "-c", program], limits=LIMITS)
        assert result.outcome is ExecOutcome.FILE_LIMIT


async def test_links_that_a_program_leaves_are_deleted_and_not_what_they_lead_to(
    sandboxes: LocalSandboxes, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o750)
    (outside / "kept").touch(mode=0o640)
    script = f"mkdir a; ln -s {outside} a/folder; ln -s {outside}/kept a/file; ln -s a loop; ln -s .. a/up"
    async with sandboxes.open() as sandbox:
        assert (await sandbox.exec(["sh", "-c", script], limits=LIMITS)).exit_code == 0
    assert (outside / "kept").stat().st_mode & 0o777 == 0o640
    assert outside.stat().st_mode & 0o777 == 0o750


async def test_standard_streams_have_their_names(sandboxes: LocalSandboxes) -> None:
    script = "readlink /dev/stdin /dev/stdout /dev/stderr /dev/fd"
    async with sandboxes.open() as sandbox:
        result = await sandbox.exec(["sh", "-c", script], limits=LIMITS)
        assert result.stdout.split() == [b"/proc/self/fd/0", b"/proc/self/fd/1", b"/proc/self/fd/2", b"/proc/self/fd"]


async def test_no_more_programs_run_at_once_than_allowed(tmp_path: Path) -> None:
    sandboxes = await start_sandboxes(max_running=2, scratch=tmp_path)
    script = "mkdir /box/$1 && date +%s%N && sleep 0.2 && date +%s%N"

    async def run(number: int) -> tuple[int, int]:
        async with sandboxes.open() as sandbox:
            result = await sandbox.exec(["sh", "-c", script, "sh", str(number)], limits=LIMITS)
            begun, ended = result.stdout.split()
            return int(begun), int(ended)

    ran = await asyncio.gather(*(run(number) for number in range(6)))
    at_once = [sum(begun <= moment < ended for begun, ended in ran) for moment, _ in ran]
    assert 1 <= max(at_once) <= 2


async def test_many_programs_leave_no_descriptors_or_tasks(tmp_path: Path) -> None:
    sandboxes = await start_sandboxes(scratch=tmp_path)
    async with sandboxes.open() as sandbox:
        await sandbox.exec(["true"], limits=LIMITS)
        before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        for _ in range(10):
            await sandbox.exec(["true"], limits=LIMITS)
            flood = await sandbox.exec(["sh", "-c", "yes"], limits=LIMITS)
            assert flood.outcome is ExecOutcome.OUTPUT_LIMIT
        assert len(os.listdir("/proc/self/fd")) <= before
        assert len(asyncio.all_tasks()) == tasks


async def test_an_isolation_that_fails_is_no_result_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolation = Isolation(level=IsolationLevel.BUBBLEWRAP, network_cut=True, files_hidden=True, detail="")
    sandboxes = LocalSandboxes(isolation=isolation, max_running=1, scratch=tmp_path)
    async with sandboxes.open() as sandbox:
        broken = tmp_path / "bwrap"
        broken.write_text("#!/bin/sh\necho out of namespaces >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SandboxError, match="out of namespaces"):
            await sandbox.exec(["true"], limits=LIMITS)
        broken.unlink()
        with pytest.raises(SandboxError, match="not installed any more"):
            await sandbox.exec(["true"], limits=LIMITS)
