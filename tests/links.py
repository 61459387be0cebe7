"""Checks the links between the documents: python3 tests/links.py [--fix]

A link to a file of the repository is by reference (`[text][docs/streams.md]`, or `[docs/streams.md]` alone), and the
reference is the path itself, defined at the end of its document. So the documents read alike as files and as pages of
the library's documentation, where `src/links.md` comes first and gives each reference its page. --fix rewrites links
that are written out, the definitions, and `src/links.md`. What is named must exist, headings too. Pictures are shown
where a document is read as a file, so they are written out.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INLINE = re.compile(r"(?<!!)\[([^\]]*?)\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\](?:\(([^)\s]+)\))?")
DEFINITION = re.compile(r"^\[([^\]\n]+)\]: (\S+)$", re.M)
PAGES = re.compile(r'^ {8}(\w+) "\.\./([^"]+)"$', re.M)
ELSEWHERE = {
    "LICENSE-APACHE": "https://www.apache.org/licenses/LICENSE-2.0",
    "LICENSE-MIT": "https://opensource.org/license/mit",
}


def away(target):
    return target.startswith(("http:", "https:", "#"))


def rewritten(text):
    """The document with its links by reference, and what they refer to."""
    text = re.sub(r"\n+(?:\[[^\]\n]+\]: \S+\n)+\Z", "\n", text)

    def by_reference(match):
        shown, target = match[1], match[2]
        if away(target):
            return match[0]
        return f"[{shown}]" if shown == target else f"[{shown}][{target}]"

    # Code is no prose.
    parts = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.M | re.S)
    parts[::2] = [INLINE.sub(by_reference, part) for part in parts[::2]]
    text = "".join(parts)
    # Of `[text][reference]` the text is none.
    prose = re.sub(r"\[[^\]]*\](?=\[)", "", "".join(parts[::2]))
    named = {label for label in re.findall(r"\[([^\]\n]+)\]", prose) if re.fullmatch(r"[\w./-]*(\.md|LICENSE-\w+)(#[\w-]+)?", label)}
    if named:
        text = text.rstrip("\n") + "\n\n" + "".join(f"[{label}]: {label}\n" for label in sorted(named))
    return text, named


def headings(path):
    found = set()
    for title in re.findall(r"^#+ (.*)$", path.read_text(), re.M):
        title = re.sub(r"[^\w\- ]", "", title.lower())
        found.add(title.strip().replace(" ", "-"))
    return found


def main():
    fix = "--fix" in sys.argv[1:]
    pages = {path: name for name, path in PAGES.findall((ROOT / "src/lib.rs").read_text())}
    faults, references = [], {}
    documents = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    for document in documents:
        name = str(document.relative_to(ROOT))
        text = document.read_text()
        fixed, named = rewritten(text)
        if fixed != text:
            if fix:
                document.write_text(fixed)
            else:
                faults.append(f"{name}: links are not by reference, or their definitions are not at the end")
        if name != "README.md" and name not in pages:
            faults.append(f"{name}: it is no page of the guide in src/lib.rs")
        for picture in IMAGE.findall(fixed):
            if not away(picture) and not (picture and (document.parent / picture).is_file()):
                faults.append(f"{name}: there is no picture {picture}")
        for label in sorted(named):
            path, _, anchor = label.partition("#")
            target = (document.parent / path).resolve()
            if not target.is_file():
                faults.append(f"{name}: there is no {path}")
                continue
            if anchor and anchor not in headings(target):
                faults.append(f"{name}: {path} has no heading #{anchor}")
            inside = str(target.relative_to(ROOT))
            page = ELSEWHERE.get(inside) or (f"crate::guide::{pages[inside]}" if inside in pages else "crate")
            references[label] = page + (f"#{anchor}" if anchor else "")
    table = "".join(f"[{label}]: {page}\n" for label, page in sorted(references.items())) + "\n"
    links = ROOT / "src/links.md"
    if not links.is_file() or links.read_text() != table:
        if fix:
            links.write_text(table)
        else:
            faults.append("src/links.md: it is not what the documents refer to")
    for fault in faults:
        print(fault)
    print(f"{len(documents)} documents, {len(references)} references, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
