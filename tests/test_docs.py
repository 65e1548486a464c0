"""The pages: they build strictly, their programs run, their command lines parse, their error messages exist."""

import ast
import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys
import warnings

import pytest
from test_pages import load

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A python block, or a comment "before: ..." with what a block takes for granted; those after "not run: ..." aren't.
PROGRAM = re.compile(r"^(?:<!-- (not run|before): (.*?) -->|```python\n(.*?)^```)", re.DOTALL | re.MULTILINE)


def program(page):
    """All blocks of a page as one program; lines keep their numbers."""
    text = page.read_text(encoding="utf-8")
    lines, skip = [""] * text.count("\n"), False
    for found in PROGRAM.finditer(text):
        kind, hidden, code = found.groups()
        if kind == "not run":
            skip = True
            continue
        if kind is None and skip:
            skip = False
            continue
        first = text.count("\n", 0, found.start()) + (kind is None)
        for number, line in enumerate((hidden or code).splitlines()):
            lines[first + number] = line
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of other packages are theirs
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_programs_run(page, tmp_path, monkeypatch, capsys):
    """And print what the comments beside their prints promise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = program(page)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(source, str(page), "exec"), {"__name__": page.stem})
    printed = capsys.readouterr().out.splitlines()
    for promised in re.findall(r"^\s*print\(.*\)  # (.+)$", source, re.MULTILINE):
        assert promised in printed


def command_lines():
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if line.startswith("qsub "):
                    yield pytest.param(line, id=f"{page.stem}: {line}")


@pytest.mark.parametrize("line", list(command_lines()))
def test_command_lines_parse(line):
    from qsub.cli.app import qsub

    name, *rest = shlex.split(line, comments=True)[1:]
    assert qsub.commands[name].make_context(name, rest).params


def test_options_and_exit_codes_are_the_documented_ones():
    import click

    from qsub.cli import app

    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for command in app.qsub.commands.values():
        assert f"## {command.name}" in page
        for option in (param for param in command.params if isinstance(param, click.Option)):
            assert option.opts[0] in page, option.opts
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} | {app.TERMINATED}
    codes = {app.SUCCESS, 1, app.USAGE, app.MISSING, app.BAD_INPUT, app.NOT_WRITTEN, app.INTERRUPTED, app.TERMINATED}
    assert documented == codes
    assert all(f" {code} " in f"{app.EPILOG} ".replace("\n", " ") for code in codes)


# ---- Messages ----


def messages():
    """A pattern for each text in the source: what is filled in matches anything."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            fixed = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            texts = [text for text in fixed if isinstance(text, str)]
            if sum(len(text) for text in texts) >= 20:
                yield re.compile("".join(".+?" if text is None else re.escape(str(text)) for text in fixed), re.DOTALL)


def exists(message, patterns):
    """Whether the source has a text, or a part of this message of its own, that makes it up from start to end.

    A remedy is appended to some of them (an operator's), so a message may be two texts.
    """
    return any(p.fullmatch(message) or (p.match(message) and _rest(p, message, patterns)) for p in patterns)


def _rest(pattern, message, patterns):
    rest = message[pattern.match(message).end() :].strip()
    return any(p.fullmatch(rest) for p in patterns)


@pytest.mark.parametrize(("page", "least"), [("faq", 21), ("distributed", 3)])
def test_quoted_messages_exist(page, least):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^```text\n(.*?)\n```", text, re.DOTALL | re.MULTILINE)
    patterns = list(messages())
    assert len(quoted) >= least
    for message in quoted:
        assert exists(message, patterns), message
        shuffled = " ".join(reversed(message.split()))  # of the same words
        assert not exists(shuffled, patterns), shuffled


# ---- The site ----


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (the extra docs)")
def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert "Replace the weight of each nn.Linear by an Int8RowwiseTensor" in api


def test_links_of_the_readme_lead_somewhere():
    """mkdocs checks those of the site."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert "docs/quick-start.md" in links
    assert not [link for link in links if "://" not in link and not (ROOT / link).is_file()]


@pytest.mark.slow
def test_plots_of_the_concepts(tmp_path):
    """All are drawn, and show what the page says of them."""
    pytest.importorskip("matplotlib")
    plots = load(ROOT / "benchmarks" / "plot_codes.py")
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    for name in plots.PLOTS:
        plots.draw(name, tmp_path)
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
        assert f"images/{name}.svg" in page and (ROOT / "docs" / "images" / f"{name}.svg").is_file()

    magnitudes, curves = plots.row_scale()
    ours, divided = curves.values()
    assert min(value for x, value in zip(magnitudes, ours, strict=True) if x > 3e-6) > 40
    assert max(value for x, value in zip(magnitudes, divided, strict=True) if x < 3e-6) == 0

    sizes, curves = plots.row_bits()
    assert min(a - b for a, b in zip(curves["8 bits"], curves["4 bits"], strict=True)) > 12
    assert 26 < curves["8 bits"][sizes.index(20.0)] < 28

    _, curves = plots.block_range()
    assert max(curves["block_float8"]) < 0.02 and max(curves["dynamic tree"]) > 1 and max(curves["linear"]) > 100

    _, curves = plots.block_stall()
    last = {name: values[-1] for name, values in curves.items()}
    assert abs(last["stochastic"] - last["fp32"]) < 0.01 and last["to nearest"] < 0.25 and last["fp32"] > 0.9
