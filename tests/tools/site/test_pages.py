from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
import yaml

from tools.pages import PAGES
from tools.site.pages import DECISIONS, entries, gather, place, rewritten, title

ROOT = Path(__file__).parents[3]


def navigation() -> list[object]:
    found: list[object] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    named = [path for path in entries(navigation()) if path != DECISIONS]
    assert len(named) == len(set(named))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in pages if not path.startswith(DECISIONS)} | set(PAGES) == {
        path for path in named if not path.startswith("../")
    }
    outside = [path for path in named if path.startswith("../")]
    assert [path for path in outside if not (ROOT / "docs" / path).is_file()] == []


def test_every_link_of_the_pages_leads_somewhere(tmp_path: Path) -> None:
    texts = {name: render() for name, render in PAGES.items()}
    made = gather(ROOT, tmp_path / "pages", navigation(), texts)
    missing = [path for path in entries(made) if not (tmp_path / "pages" / path).is_file()]
    assert missing == []
    decisions = sorted((ROOT / "docs" / DECISIONS).glob("*.md"))
    assert [f"{DECISIONS}{path.name}" for path in decisions] == [
        path for path in entries(made) if path.startswith(f"{DECISIONS}0")
    ]
    index = (tmp_path / "pages" / DECISIONS / "index.md").read_text(encoding="utf-8")
    assert all(f"[{title(path)}]({path.name})" in index for path in decisions)


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_md", ".md").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_what_is_linked_outside_of_docs_becomes_a_page(tmp_path: Path) -> None:
    write(
        tmp_path,
        docs__a_md="# A\n\n[code](../lib/x.py), [all](../lib) and [more](../MORE.md#part)\n",
        docs__decisions__0001_md="# 0001: First\n",
        MORE_md="# More\n\n[back](docs/a.md), [there](docs/decisions)\n",
        lib__x_py="print('~~~')\n",
    )
    into = tmp_path / "pages"
    assert gather(tmp_path, into, ["a.md", {"All": DECISIONS}, "../MORE.md"]) == [
        "a.md",
        {"All": ["decisions/index.md", "decisions/0001.md"]},
        "source/MORE.md",
    ]
    page = (into / "a.md").read_text(encoding="utf-8")
    assert "(source/lib/x.py.md)" in page
    assert "(source/lib/index.md)" in page
    assert "(source/MORE.md#part)" in page
    more = (into / "source" / "MORE.md").read_text(encoding="utf-8")
    assert "[back](../a.md), [there](../decisions/index.md)" in more
    assert "~~~~~python\nprint('~~~')\n~~~~~" in (into / "source/lib/x.py.md").read_text("utf-8")
    assert "- [x.py](x.py.md)" in (into / "source/lib/index.md").read_text("utf-8")


def test_a_page_may_be_made_instead_of_kept(tmp_path: Path) -> None:
    write(tmp_path, docs__a_md="# A\n\n[made](b.md)\n", docs__decisions__0001_md="# 0001: First\n")
    into = tmp_path / "pages"
    gather(tmp_path, into, ["a.md", "b.md"], {"b.md": "# B\n\n[back](a.md)\n"})
    assert (into / "b.md").read_text(encoding="utf-8") == "# B\n\n[back](a.md)\n"


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    write(tmp_path, docs__a_md="# A\n\n[gone](b.md)\n", docs__decisions__0001_md="# 0001: First\n")
    with pytest.raises(SystemExit, match=r"docs/a.md links to b.md, which does not exist"):
        gather(tmp_path, tmp_path / "pages", ["a.md"])


def test_links_in_code_and_to_other_machines_stay() -> None:
    text = "[a](x) `[b](x)` [c](https://x.y/z) [d](#x)\n\n```\n[e](x)\n```\n[f](x)\n"
    seen: list[str] = []

    def change(target: str) -> str:
        seen.append(target)
        return "new" if target == "x" else target

    changed = rewritten(text, change)
    assert seen == ["x", "https://x.y/z", "#x", "x"]
    assert changed == (
        "[a](new) `[b](x)` [c](https://x.y/z) [d](#x)\n\n```\n[e](x)\n```\n[f](new)\n"
    )


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("docs/how-to/a.md", "how-to/a.md"),
        ("docs/depth.svg", "depth.svg"),
        ("CHANGELOG.md", "source/CHANGELOG.md"),
        ("examples/a.py", "source/examples/a.py.md"),
    ],
)
def test_where_a_file_goes(path: str, page: str) -> None:
    assert str(place(PurePosixPath(path))) == page
