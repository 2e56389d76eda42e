"""What MkDocs is told beside mkdocs.yml: files of the repository that pages link to come along.

Pages in docs/ link to ../ARCHITECTURE.md and ../deploy/..., which is right where people read them in the repository.
In the built pages README.md, ARCHITECTURE.md and CHANGELOG.md are pages, too, and all else that is linked to is a file
under repository/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK: Final = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds what is linked to from outside of docs/."""
    wanted = set(PAGES)
    for file in list(files.documentation_pages()):
        wanted |= {path for link in _LINK.finditer(file.content_string) if (path := _outside(link))}
    for path in sorted(wanted):
        source = ROOT / path
        if not source.is_file():
            raise FileNotFoundError(f"docs/ links to {path}, which is no file of the repository")
        files.append(File.generated(config, _place(path), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to where those files are in the built pages."""
    if page.file.src_uri in PAGES.values():
        return _LINK.sub(_from_root, markdown)
    return _LINK.sub(_from_docs, markdown)


def _outside(link: re.Match[str]) -> str:
    """Where it leads to in the repository, or nothing when that is in docs/ or elsewhere."""
    return link["path"].removeprefix("../") if link["path"].startswith("../") else ""


def _from_docs(link: re.Match[str]) -> str:
    path = _outside(link)
    return f"[{link['text']}]({_place(path)}{link['anchor'] or ''})" if path else link[0]


def _from_root(link: re.Match[str]) -> str:
    path = link["path"].removeprefix("docs/")
    if "://" in path or path != link["path"]:
        return link[0].replace(link["path"], path)
    if path in PAGES:
        return f"[{link['text']}]({_place(path)}{link['anchor'] or ''})"
    return link["text"]  # folders, which have no page


def _place(path: str) -> str:
    return PAGES.get(path, f"repository/{path}")
