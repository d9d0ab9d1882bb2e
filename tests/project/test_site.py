"""The documentation's site: generated pages, their links, their examples; `make docs` builds the rest."""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import normformer_rs as nfrs
from normformer_rs.reproduce import REPRODUCTIONS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benches import figures  # noqa: E402
from docs.generate import (  # noqa: E402
    api,
    arguments,
    check,
    equations,
    examples,
    links,
    names,
    notebooks,
    pages,
    reproductions,
    spec,
)
from docs.generate.tables import results  # noqa: E402

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The pages, with empty pictures and without what their examples print, which take a minute."""

    def save(figure, path):
        Path(path).touch()
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", save)
        patch.setattr(examples, "run", lambda code, name="example": "printed")
        return pages.write(tmp_path_factory.mktemp("site"))


@pytest.mark.long
def test_examples_run_and_pictures_are_drawn(tmp_path):
    found = pages.write(tmp_path)
    assert len([page for page in found.values() if "```text\n" in page]) > 40
    assert len([path for path in tmp_path.rglob("*.png") if path.stat().st_size > 10_000]) > 10


@pytest.mark.parametrize("kind", ["norms", "residuals"])
def test_every_name_has_its_page(made, kind):
    for entry in nfrs.tables()[kind]:
        page = made[f"{kind}/{entry['name']}.md"]
        assert page.startswith(f"# `{entry['name']}`\n")
        for part in ("Source: ", "## Example\n\n```python\n", "```text\n", "## Definition\n", "## Options\n"):
            assert part in page, f"{entry['name']} lacks {part!r}"
        tables = [results(name) for name in ("pn-table1-here", "brn-table1-18-here")]
        is_measured = any(entry["name"] in row.values() for rows in tables for row in rows)
        assert not is_measured or "## Where it helps and fails\n" in page, f"docs/notes.md lacks {entry['name']}"
        assert f"({entry['name']}.md)" in made[f"{kind}/index.md"]


def test_a_name_without_notes_and_specification_has_its_page(made, monkeypatch, tmp_path):
    entry = {**nfrs.tables()["norms"][0], "source": "an example"}
    monkeypatch.setattr(spec, "section", lambda name: None)
    monkeypatch.setattr(names, "notes", lambda name: [])
    page = names._norm(entry, tmp_path)
    assert "## Example" in page and "Definition" not in page and "helps" not in page


def test_options_belong_to_their_names():
    found = {name: [field.name for field in names.options(name, "norms")] for name in ("scalenorm", "powernorm-v")}
    assert found["scalenorm"] == []
    assert set(found["powernorm-v"]) == {"powernorm_alpha_fwd", "powernorm_sync", "groupscaling"}
    assert [f.name for f in names.options("branchnorm", "residuals")] == ["branchnorm_steps", "branchnorm_growth"]
    assert names.options("prenorm", "residuals") == []


def test_the_reference_has_every_public_name_and_option(made):
    for module in api.MODULES:
        page = made[f"api/{module}.md"]
        headings = set(re.findall(r"^## (\S+)$", page, re.M))
        assert headings == set(api.public(module))
    reference = made["api/normformer_rs.md"]
    kinds = (nfrs.TransformerConfig, nfrs.TrainingConfig, nfrs.DataConfig, nfrs.SearchConfig, nfrs.GenerationConfig)
    for kind in kinds:
        for field in kind.FIELDS:
            assert f"| `{field.name}` |" in reference
    assert "swap_norms(\n    model: Module,\n    to: str | Callable[..., Module],\n    *,\n" in reference
    assert "layer_norm(Tensor x" in made["api/operators.md"].replace("\n", " ")


def _sections(page, mark):
    """A page's sections by their headings."""
    return {part.partition("\n")[0]: part for part in re.split(rf"^{mark} ", page, flags=re.M)[1:]}


@pytest.mark.parametrize("module", api.MODULES)
def test_every_public_argument_is_a_row(made, module):
    """Of functions, constructors and methods; each name has its source and a row in the page's summary."""
    home, page = importlib.import_module(module), made[f"api/{module}.md"]
    summary, sections = page.partition("\n## ")[0], _sections(page, "##")
    for name in api.public(module):
        assert f"| [`{name}`](#" in summary
        value = getattr(home, name)
        if inspect.ismodule(value) or isinstance(value, (dict, str)):
            continue
        section = sections[name]
        assert f"[source]({links.GITHUB}python/" in section, name
        known = {name: value}
        if inspect.isclass(value):
            found = {f"{name}.{method}": value for method, value in api.methods(value).items()}
            known |= {method: value for method, value in found.items() if not isinstance(value, property)}
        for called, part in ((name, section), *_sections(section, "###").items()):
            for parameter in arguments.parameters(known.get(called)):
                assert re.search(rf"^\| `\*{{0,2}}{parameter.name}` \|", part, re.M), f"{called}: {parameter.name}"


def test_methods_of_the_package_itself_are_hidden(made):
    page = made["api/normformer_rs.nn.md"]
    assert "### BatchNorm.forward\n" in page
    assert all(f".{name}\n" not in page for name in ("in_use", "profiled_gains", "extra_repr", "add_module"))


def test_a_docstring_tells_of_several_arguments_in_a_line():
    text = "Sums.\n\nArgs:\n    a: one. b, c: two,\n        and: more.\n    **d: last.\n\nErrors: none."
    assert arguments.listed(text) == {"a": "one.", "b": "two, and: more.", "c": "two, and: more.", "d": "last."}


def test_names_link_to_their_pages():
    text = "# `deepnorm`\n\n`deepnorm`, `rmsnorm:llama`, `else`, [`prenorm`](x.md)\n\n```\n`prenorm`\n```\n"
    assert links.linked("own.md", text) == text.replace(
        "`deepnorm`, `rmsnorm:llama`", "[`deepnorm`](residuals/deepnorm.md), [`rmsnorm:llama`](names.md#rmsnorm:llama)"
    )
    assert "[`dyt`](../norms/dyt.md)" in links.linked("residuals/deepnorm.md", "`dyt` beside `deepnorm`")
    assert "`deepnorm`](" not in links.linked("residuals/deepnorm.md", "`dyt` beside `deepnorm`")


def test_every_name_has_an_anchor_and_a_definition_that_search_finds(made):
    page = made["names.md"]
    for kind in ("norms", "families", "residuals"):
        for entry in nfrs.tables()[kind]:
            assert f'<a id="{entry["name"]}"></a>' in page
    assert "[`deepnorm`](residuals/deepnorm.md)" in page and '<a id="init-deepnorm"></a>`deepnorm`' in page
    assert '<span class="source" aria-hidden="true">y = γ⊙(x−μ)/√(σ²+ε)+β</span>' in page
    assert page.count("<math data-search-exclude") == page.count('<span class="source"')


@pytest.mark.parametrize("module", api.MODULES)
def test_every_public_name_has_an_example(module):
    """In its docstring or in docs/examples.md, which names nothing else."""
    home = importlib.import_module(module)
    missing = [name for name in api.public(module) if not inspect.ismodule(getattr(home, name))
               and ">>>" not in (getattr(home, name).__doc__ or "")
               and f"{module}.{name}" not in examples.of_names()]  # fmt: skip
    assert not missing
    listed = [name.rpartition(".") for name in examples.of_names()]
    assert all(name in api.public(module) for home, _, name in listed if home == module)


def test_the_commands_have_their_page(made):
    assert "## train\n" in made["commands.md"] and "--powernorm-mode" in made["commands.md"]


def test_every_reproduction_is_on_its_page(made, monkeypatch, tmp_path):
    """With its runs, and what benches/results has of it; a new one, too."""
    page = made["reproduce.md"]
    for name, entry in REPRODUCTIONS.items():
        section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert entry.claim in section
        assert all(f"| {scale} | {len(found.rows)} |" in section for scale, found in entry.scales.items())
        measured = results(f"{name}-here")
        assert bool(measured) == ("Measured at scale here" in section) == (f"(images/{name}-here.png)" in section)
    assert "| postnorm+layernorm | 36.32 |" in page and "stays" in page.partition("## Names")[0]
    monkeypatch.setitem(REPRODUCTIONS, "added", REPRODUCTIONS["bf16"]._replace(name="added"))
    assert "\n### added\n" in reproductions.entries("# P\n\n## Names\n", tmp_path)


def test_blocks_of_the_guide_name_their_files(made):
    """As zensical reads it: it takes a block with a bare path for prose."""
    assert '\n```rust title="src/norm/max_norm.rs"\n' in made["contributing.md"]


def test_every_page_is_in_the_menu_once(made):
    menu = json.dumps(pages.menu(made))
    for name in made:
        assert menu.count(f'"{name}"') == 1, name
    with pytest.raises(ValueError, match=r"CONTENTS does not list: stray\.md"):
        pages.menu({**made, "stray.md": "# Stray"})


def test_links_lead_to_pages_and_pictures(made):
    known = {*made, *(f"notebooks/{path.stem}.md" for path in notebooks.NOTEBOOKS.glob("*.py"))}
    for name, page in made.items():
        for target in re.findall(r"\]\(([^)#\s]+\.md)", re.sub(r"```.*?```", "", page, flags=re.S)):
            path = (Path("/") / name).parent.joinpath(target).resolve().relative_to("/").as_posix()
            assert path in known, f"{name}: {target}"


def test_a_link_to_nothing_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("# A page\n\n`[code](stays.md)` and [this](nowhere.md#at-all)\n")
    with pytest.raises(ValueError, match=r"page\.md: \[this\]\(nowhere\.md#at-all\) leads nowhere"):
        pages._moved("page.md", tmp_path)


@pytest.mark.parametrize(
    "line, formula",
    [
        ("x̂ = a/√(b² + ε)", "<mover"),
        ("y = γ⊙x/√(mean x²+ε) over the last dimension", "over the last dimension"),
        ("α_e = 0.81(N⁴M)^(1/16)", '<msup><mrow class="group"><mo stretchy="false"'),
        ("‖x‖_p", "<msub><mrow><mo"),
        ("x⁺ = N(x + F(x)),   s⁺ = s", '<span class="gap"></span>'),
        ("⟨w, v⟩/√d", '<mfrac><mrow class="group"><mo stretchy="false" lspace="0" rspace="0">⟨'),
    ],
)
def test_equations_are_drawn(line, formula):
    found = equations.render(line)
    assert "<math" in found and formula in found
    assert found.count("<mrow") == found.count("</mrow>")


def test_a_fraction_needs_no_parentheses():
    found = equations.render("(x − μ)/√(σ² + ε)")
    assert "<mfrac><mrow><mi>x</mi>" in found and "<msqrt><mrow>" in found and "(" not in found.partition(">")[2]


def test_every_equation_of_the_tables_can_be_read():
    for kind in ("norms", "residuals"):
        for entry in nfrs.tables()[kind]:
            assert "<code>" not in equations.render(entry["equation"]), entry["name"]


def test_what_is_no_equation_stays():
    assert equations.render("a) b(") == "<code>a) b(</code>"


def test_the_finished_site_is_checked(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#here">x</a><a href="#top">y</a><p id="top"></p>')
    (tmp_path / "b.html").write_text(
        '<p id="here"></p><img src="c.png"><script src="https://cdn.example/x.js"></script>'
    )
    assert check.faults(tmp_path) == ["b.html: c.png is not there", "b.html: loads https://cdn.example/x.js"]
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a>')
    assert "a.html: b.html#there names no anchor" in check.faults(tmp_path)
    (tmp_path / "a.html").write_text(f'<a href="{links.GITHUB}Makefile#L1-L2">x</a><a href="{links.GITHUB}gone">y</a>')
    assert check.faults(tmp_path)[:1] == [f"a.html: {links.GITHUB}gone is no line of the sources"]
    assert check.faults(tmp_path / "nothing") == [f"{tmp_path / 'nothing'}: there are no pages here"]


def test_a_docstring_becomes_markdown():
    text = "Sums x_i*y.\n\n>>> 1 + 1\n2\n\nArgs:\n    a, b: what\n        they are.\n    *c: more.\n\nErrors: none."
    made = api.document(text)
    assert made.startswith("Sums x\\_i\\*y.\n\n```pycon\n>>> 1 + 1\n2\n```")
    assert "| `b` | what they are. |" in made and "| `c` | more. |" in made and "**Errors:** none." in made


def test_progress_bars_show_their_end():
    assert notebooks._last_states("0%\r50%\r100%\ndone\n") == "100%\ndone\n"
    pieces = [SimpleNamespace(output_type="stream", text=text) for text in ("0%", "\r50%", "\r100%\ndone\n")]
    assert [*notebooks._outputs(pieces, "name", Path())] == ["```text\n100%\ndone\n```"]
