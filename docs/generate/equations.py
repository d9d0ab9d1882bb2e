"""Equations as docs/spec.md and the tables write them, `x̂ = (x − μ)/√(σ² + ε)`, as MathML, which browsers draw.

A line may hold words: they stay text between the formulas. A line that cannot be read stays as it is, in code font.
"""

import html
import re
import unicodedata

FUNCTIONS = re.compile(
    "mean|max|min|sign|abs|log|ln|tanh|erf|silu|round|exp|sin|cos|drop|relu|softmax|Var|Attn|Concat|FFN|NLL"
    "|curve|logistic|score|lp|len|head|vec|out|lr|wd"
)
"""Names of more than one letter that belong to formulas."""
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵗᵀ′", "0123456789+−tT′"))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉ₖₜ", "0123456789kt"))
_OPERATORS = "=+−-·⊙×←≤≥<>∈∝,;:…/"
_OPEN = {"(": ")", "[": "]", "{": "}"}
_TOKEN = re.compile(
    rf"`[^`]+`|\s+|[{''.join(_SUPER)}{''.join(_SUB)}⅓½]|\d+(?:,\d{{3}})*(?:\.\d+)?(?:e-?\d+)?"
    r"|(?:[A-Za-z]+(?:'[a-z])?|[^\W\d_])[\u0300-\u036f]*|."
)


class _Unreadable(Exception):
    """Not an equation as this module knows them."""


def render(line: str) -> str:
    """The line as HTML: `<math>` for its formulas, text between them; `<code>` where that fails."""
    try:
        return "".join(_runs(line.strip()))
    except _Unreadable:
        return f"<code>{html.escape(line.strip())}</code>"


def _runs(line: str) -> list[str]:
    """Formulas and text in turn."""
    parts: list[str] = []
    tokens = _tokens(line)
    formula: list[str] = []

    def close() -> None:
        """Ends the formula; what is not one, a comma or a space, is text."""
        while formula and formula[0].isspace():
            parts.append(formula.pop(0))
        tail: list[str] = []
        while formula and (formula[-1].isspace() or formula[-1] in ",;:."):
            tail.insert(0, formula.pop())
        if any(re.match(r"[^\W_]|√", token) for token in formula):
            source = "".join(formula)
            body = _Parser(formula).whole()
            parts.append(f'<math displaystyle="true" alttext="{html.escape(source.strip())}">{body}</math>')
        else:
            parts.append(html.escape("".join(formula)))
        parts.append(html.escape("".join(tail)))
        formula.clear()

    depth = at = 0
    while at < len(tokens):
        token, last = tokens[at], tokens[at - 1] if at else " "
        aside = _aside(tokens[at:]) if depth == 0 and token == "(" and last.isspace() else 0
        depth += (token in _OPEN) - (token in _OPEN.values())
        if aside:
            depth = 0
            close()
            remark = "".join(map(_text, tokens[at : at + aside]))
            parts.append(re.sub(r"\*(\w+)\*", r"<em>\1</em>", remark))
        elif depth == 0 and last not in "_^" and _is_prose(token):
            close()
            parts.append(_text(token))
        elif depth == 0 and re.match(r"\s{2,}", token):
            close()
            parts.append('<span class="gap"></span>')
        elif depth == 0 and token in ",;" and tokens[at + 1 : at + 2] and tokens[at + 1].isspace():
            formula.append(token)
            close()  # a line may be broken here
        else:
            formula.append(token)
        at += aside or 1
    close()
    return parts


def _aside(tokens: list[str]) -> int:
    """How many tokens a remark in parentheses has; 0 where they hold a formula."""
    depth = 0
    for count, token in enumerate(tokens, 1):
        depth += (token in _OPEN) - (token in _OPEN.values())
        if depth == 0:
            return count if any(_is_prose(t) or t in "§`" for t in tokens[:count]) else 0
    return 0


def _text(token: str) -> str:
    return f"<code>{html.escape(token[1:-1])}</code>" if token.startswith("`") else html.escape(token)


def _tokens(line: str) -> list[str]:
    return [match.group() for match in _TOKEN.finditer(unicodedata.normalize("NFC", line))]


def _is_prose(token: str) -> bool:
    """Code, or a word that is no symbol: longer than one letter, and neither a function nor a differential."""
    plain = re.sub(r"[\u0300-\u036f]", "", token)
    is_word = len(plain) > 1 and plain[0].isalpha()
    is_symbol = FUNCTIONS.fullmatch(plain) or re.fullmatch(r"d[a-zα-ω]", plain)
    return plain.startswith("`") or (is_word and not is_symbol)


class _Parser:
    """One formula, from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.is_small = tokens, 0, False

    def whole(self) -> str:
        found = self.row(None)
        if self.at != len(self.tokens):
            raise _Unreadable
        return found

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise _Unreadable
        self.at += 1
        return token

    def row(self, until: str | None) -> str:
        """Everything up to a closing sign; `a/b` becomes a fraction."""
        items: list[str] = []
        while (token := self.peek()) is not None and token != until:
            if token in _OPEN.values():
                raise _Unreadable
            if token.isspace():
                self.take()
            elif token == "/" and not self.is_small:
                self.take()
                if not items:
                    raise _Unreadable
                self.spaces()
                items.append(f"<mfrac>{_bare(items.pop())}{_bare(self.factor())}</mfrac>")
            elif token in _OPERATORS:
                self.take()
                space = ' lspace="0" rspace="0"' if token == "/" else ""
                items.append(f"<mo{space}>{html.escape('−' if token == '-' else token)}</mo>")
            else:
                items.append(self.factor())
        if until is not None and self.peek() != until:
            raise _Unreadable
        return f"<mrow>{''.join(items)}</mrow>"

    def spaces(self) -> None:
        while (token := self.peek()) is not None and token.isspace():
            self.take()

    def factor(self) -> str:
        """A symbol, number, root or group, with what stands above and below it, and its argument."""
        token = self.take()
        is_callable = False
        if token == "√":
            return f"<msqrt>{_bare(self.factor())}</msqrt>"
        if token in "({[":
            base = self.group(token)
        elif token in "‖|":
            base = f'<mrow><mo stretchy="false">{token}</mo>{self.row(token)}<mo stretchy="false">{token}</mo></mrow>'
            self.take()
        elif token[0].isdigit():
            base = f"<mn>{token}</mn>"
            is_callable = self.peek() == "["
        elif token[0].isalpha():
            base, is_callable = _symbol(token), True
        elif token in "∞⅓½⟨⟩∂":
            base = f"<mn>{token}</mn>"
        elif token == "Σ" or token == "∏" or token in "≈*'":
            base = f"<mo>{token}</mo>"
        elif token == ".":
            base = "<mo>.</mo>"
        elif token == "⌊" or token == "⌋" or token == "∘":
            base = f'<mo stretchy="false">{token}</mo>'
        else:
            raise _Unreadable
        below, above = self.scripts()
        found = _scripted(base, below, above)
        if FUNCTIONS.fullmatch(token) and (self.peek() or "x").isspace():
            found += '<mspace width="0.17em"/>'
        if is_callable and self.peek() in ("(", "["):
            found = f"<mrow>{found}{self.group(self.take())}</mrow>"
            below, above = self.scripts()
            found = _scripted(found, below, above)
        return found

    def group(self, opened: str) -> str:
        inside = self.row(_OPEN[opened])
        self.take()
        if opened == "{":
            return inside
        # a browser stretches parentheses that need not be, and sets them apart
        tall = "true" if "<mfrac>" in inside else "false"
        fence = f'<mo stretchy="{tall}" lspace="0" rspace="0">'
        return f'<mrow class="group">{fence}{opened}</mo>{inside}{fence}{_OPEN[opened]}</mo></mrow>'

    def scripts(self) -> tuple[str, str]:
        """(subscript, superscript) of the symbol just read, such as `_B`, `²` or `^(1/4)`."""
        below = above = ""
        while (token := self.peek()) is not None:
            if token == "_":
                self.take()
                below += self.script()
            elif token == "^":
                self.take()
                above += self.script()
            elif token in _SUPER:
                self.take()
                above += _character(_SUPER[token])
            elif token in _SUB:
                self.take()
                below += _character(_SUB[token])
            else:
                break
        return below, above

    def script(self) -> str:
        """One subscript or superscript. Fractions in it stay on one line: they would be too small to read."""
        token = self.take()
        if token in _OPEN:
            was_small, self.is_small = self.is_small, True
            found = _bare(self.group(token))
            self.is_small = was_small
            return found
        if not token[0].isalnum() and token not in "∞−":
            raise _Unreadable
        return _character(token) if token[0].isdigit() or len(token) == 1 else f"<mtext>{html.escape(token)}</mtext>"


def _scripted(base: str, below: str, above: str) -> str:
    if below and above:
        return f"<msubsup>{base}<mrow>{below}</mrow><mrow>{above}</mrow></msubsup>"
    if below:
        return f"<msub>{base}<mrow>{below}</mrow></msub>"
    return f"<msup>{base}<mrow>{above}</mrow></msup>" if above else base


def _bare(item: str) -> str:
    """A group without its parentheses, which a fraction or a root makes needless."""
    match = re.match(r'<mrow class="group">(<mo [^>]*>)\(</mo>', item)
    return item[match.end() : -len(f"{match[1]})</mo></mrow>")] if match else item


def _symbol(token: str) -> str:
    decomposed = unicodedata.normalize("NFD", token)
    letter, marks = decomposed[0], decomposed[1:2]
    if marks and unicodedata.combining(marks):
        above = {"\u0302": "^", "\u0303": "~", "\u0304": "¯"}.get(marks, "^")
        return f'<mover accent="true"><mi>{letter}</mi><mo stretchy="false">{above}</mo></mover>'
    if token == "Σ":
        return "<mo>∑</mo>"
    if re.fullmatch(r"d[a-zα-ω]", token) and not FUNCTIONS.fullmatch(token):
        return f"<mrow><mi>d</mi><mi>{token[1]}</mi></mrow>"
    if len(token) > 1:
        is_function = FUNCTIONS.fullmatch(token)
        return f"<mi>{token}</mi>" if is_function else f"<mtext>{html.escape(token)}&#160;</mtext>"
    return f"<mi>{token}</mi>"


def _character(text: str) -> str:
    return f"<mn>{text}</mn>" if text[0].isdigit() else f"<mo>{text}</mo>" if text in "+−′" else f"<mi>{text}</mi>"


def blocks(markdown: str) -> str:
    """A page's blocks that are indented by four spaces, which in docs/spec.md are equations, as MathML."""

    def block(match: re.Match[str]) -> str:
        return division([render(line) for line in match[0].strip("\n").splitlines()]) + "\n"

    return re.sub(r"(?m)(?<=\n\n)(?:^    \S.*\n)+", block, markdown)


def division(lines: list[str]) -> str:
    """Rendered lines as a block of their own."""
    return '<div class="equation">' + "".join(f"<div>{line}</div>" for line in lines) + "</div>"


def searchable(page: str) -> str:
    """A page whose formulas search finds as they were written, `α = (2L)^(1/4)`, and not letter after letter."""

    def formula(match: re.Match[str]) -> str:
        source = re.sub(r"[_*`|]", lambda sign: f"&#{ord(sign[0])};", match[1])
        return f'<math data-search-exclude{match[0][5:]}<span class="source" aria-hidden="true">{source}</span>'

    apart = page.replace('<span class="gap"></span>', '<span class="gap"></span> ').replace(
        "</div><div>", "</div> <div>"
    )
    return re.sub(r'<math [^>]*?alttext="([^"]*)"[^>]*>.*?</math>', formula, apart)
