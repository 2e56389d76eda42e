"""What MkDocs is told beside mkdocs.yml: files of the repository that pages link to come along.

Pages in docs/ link to ../ARCHITECTURE.md and ../deploy/..., and README.md links to docs/...: right for readers of the
repository. In the built pages the documents of the root are pages, too, and every other file that is linked to lies
under repository/.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK: Final = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the documents of the root, and each file outside of docs/ that a page links to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    wanted = set(PAGES)
    for name, text in texts.items():
        for link in _LINK.finditer(text):
            path = _in_repository(name, link["path"])
            if path and not path.startswith("docs/") and not (ROOT / path).is_dir():
                wanted.add(path)
    for path in sorted(wanted):
        source = ROOT / path
        if not source.is_file():
            raise FileNotFoundError(f"a document links to {path}, which is no file here")
        files.append(File.generated(config, _place(path), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to the places of their targets in the built pages."""
    built = page.file.src_uri
    source = next((name for name, place in PAGES.items() if place == built), f"docs/{built}")

    def moved(link: re.Match[str]) -> str:
        path = _in_repository(source, link["path"])
        if not path:
            return link[0]
        if (ROOT / path).is_dir():
            return link["text"]  # folders have no page
        target = path.removeprefix("docs/") if path.startswith("docs/") else _place(path)
        relative = posixpath.relpath(target, posixpath.dirname(built) or ".")
        return f"[{link['text']}]({relative}{link['anchor'] or ''})"

    return _LINK.sub(moved, markdown)


def _in_repository(source: str, path: str) -> str:
    """A link's target from the root of the repository; empty for addresses."""
    if "://" in path:
        return ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _place(path: str) -> str:
    return PAGES.get(path, f"repository/{path}")
