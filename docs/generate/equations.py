"""Converts equations in the notation of docs/spec.md, `x̂ = (x − μ)/√(σ² + ε)`, to MathML for browsers.

A line may contain words, which stay text between the formulas. A line that cannot be parsed becomes code.
"""

import html
import re
import unicodedata

FUNCTIONS = re.compile(
    "mean|max|min|sign|abs|log|ln|tanh|erf|silu|round|exp|sin|cos|drop|relu|softmax|Var|Attn|Concat|FFN|NLL"
    "|curve|logistic|score|lp|len|head|vec|out|lr|wd"
)
"""Matches names of more than one letter that are symbols of formulas, not words."""
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵗᵀ′", "0123456789+−tT′"))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉ₖₜ", "0123456789kt"))
_OPERATORS = "=+−-·⊙×←≤≥<>∈∝,;:…/"
# The sign that closes each opening one.
_OPEN = {"(": ")", "[": "]", "{": "}", "⟨": "⟩", "⌊": "⌋"}
# Code, white space, a raised or lowered sign, a number, a word or letter with its accents, any other character.
_TOKEN = re.compile(
    rf"`[^`]+`|\s+|[{''.join(_SUPER)}{''.join(_SUB)}⅓½]|\d+(?:,\d{{3}})*(?:\.\d+)?(?:e-?\d+)?"
    r"|(?:[A-Za-z]+(?:'[a-z])?|[^\W\d_])[\u0300-\u036f]*|."
)


class _Unreadable(Exception):
    """Raised if this module cannot parse a text as an equation."""


def render(line: str) -> str:
    """Returns the line as HTML: `<math>` for its formulas, and text between them. If a formula cannot be read, the
    whole line is `<code>`."""
    try:
        return "".join(_runs(line.strip()))
    except _Unreadable:
        return f"<code>{html.escape(line.strip())}</code>"


def _runs(line: str) -> list[str]:
    """Returns the formulas and texts of a line as HTML, in their order."""
    parts: list[str] = []
    tokens = _tokens(line)
    formula: list[str] = []

    def close() -> None:
        """Ends the current formula. Spaces before it, and spaces, commas and the like after it, become text."""
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

    depth = position = 0  # the number of open parentheses, and of the tokens that were read
    while position < len(tokens):
        token, previous = tokens[position], tokens[position - 1] if position else " "
        # The number of tokens in a remark that begins here; 0 if none begins.
        aside = _aside(tokens[position:]) if depth == 0 and token == "(" and previous.isspace() else 0
        depth += (token in _OPEN) - (token in _OPEN.values())
        if aside:
            depth = 0
            close()
            remark = "".join(map(_text, tokens[position : position + aside]))
            parts.append(re.sub(r"\*(\w+)\*", r"<em>\1</em>", remark))
        elif depth == 0 and previous not in "_^" and _is_prose(token):
            close()
            parts.append(_text(token))
        elif depth == 0 and re.match(r"\s{2,}", token):
            close()
            parts.append('<span class="gap"></span>')
        elif depth == 0 and token in ",;" and tokens[position + 1 : position + 2] and tokens[position + 1].isspace():
            formula.append(token)
            close()  # a line may be broken here
        else:
            formula.append(token)
        position += aside or 1
    close()
    return parts


def _aside(tokens: list[str]) -> int:
    """Returns the number of tokens in the remark that begins with the parenthesis tokens[0]; 0 if the parentheses hold
    a formula or do not end."""
    depth = 0
    for count, token in enumerate(tokens, 1):
        depth += (token in _OPEN) - (token in _OPEN.values())
        if depth == 0:
            return count if any(_is_prose(t) or t in "§`" for t in tokens[:count]) else 0
    return 0


def _text(token: str) -> str:
    """Returns a token of prose as HTML; text in backticks becomes code."""
    return f"<code>{html.escape(token[1:-1])}</code>" if token.startswith("`") else html.escape(token)


def _tokens(line: str) -> list[str]:
    """Returns the tokens of a line, which together are the whole line."""
    return [match.group() for match in _TOKEN.finditer(unicodedata.normalize("NFC", line))]


def _is_prose(token: str) -> bool:
    """Returns True for code, and for words: they have more than one letter, and are neither a function's name nor a
    differential such as `dx`."""
    plain = re.sub(r"[\u0300-\u036f]", "", token)
    is_word = len(plain) > 1 and plain[0].isalpha()
    is_symbol = FUNCTIONS.fullmatch(plain) or re.fullmatch(r"d[a-zα-ω]", plain)
    return plain.startswith("`") or (is_word and not is_symbol)


class _Parser:
    """A parser that reads the tokens of one formula from left to right, and returns MathML."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0  # the number of the next token
        self.is_small = False  # True within a subscript or superscript

    def whole(self) -> str:
        """Returns the formula as MathML. Errors: _Unreadable if it cannot be parsed."""
        mathml = self.row(None)
        if self.at != len(self.tokens):
            raise _Unreadable
        return mathml

    def peek(self) -> str | None:
        """Returns the next token without reading it; None at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str:
        """Reads the next token and returns it. Errors: _Unreadable at the end."""
        token = self.peek()
        if token is None:
            raise _Unreadable
        self.at += 1
        return token

    def row(self, until: str | None) -> str:
        """Returns everything up to the closing sign `until`, or up to the end. `a/b` becomes a fraction."""
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
                while (self.peek() or "").isspace():
                    self.take()
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

    def factor(self) -> str:
        """Returns a symbol, number, root or group, with its subscripts and superscripts, and its argument in
        parentheses."""
        token = self.take()
        is_callable = False  # True if parentheses after the symbol hold its argument
        if token == "√":
            return f"<msqrt>{_bare(self.factor())}</msqrt>"
        if token in _OPEN:
            base = self.group(token)
        elif token in "‖|":
            base = f'<mrow><mo stretchy="false">{token}</mo>{self.row(token)}<mo stretchy="false">{token}</mo></mrow>'
            self.take()
        elif token[0].isdigit():
            base = f"<mn>{token}</mn>"
            is_callable = self.peek() == "["  # 1[…] is an indicator function
        elif token[0].isalpha():
            base, is_callable = _symbol(token), True
        elif token in "∞⅓½∂":
            base = f"<mn>{token}</mn>"
        elif token in "∏≈∘*'.":
            base = f"<mo>{token}</mo>"
        else:
            raise _Unreadable
        below, above = self.scripts()
        mathml = _scripted(base, below, above)
        if FUNCTIONS.fullmatch(token) and (self.peek() or "x").isspace():
            mathml += '<mspace width="0.17em"/>'
        if is_callable and self.peek() in ("(", "["):
            mathml = f"<mrow>{mathml.replace('&#160;', '')}{self.group(self.take())}</mrow>"
            below, above = self.scripts()
            mathml = _scripted(mathml, below, above)
        return mathml

    def group(self, opened: str) -> str:
        """Returns a group with its parentheses. Its opening sign `opened` was just read. Braces are not shown."""
        inside = self.row(_OPEN[opened])
        self.take()
        if opened == "{":
            return inside
        # Without these attributes browsers stretch parentheses needlessly and put space around them.
        tall = "true" if "<mfrac>" in inside else "false"
        fence = f'<mo stretchy="{tall}" lspace="0" rspace="0">'
        return f'<mrow class="group">{fence}{opened}</mo>{inside}{fence}{_OPEN[opened]}</mo></mrow>'

    def scripts(self) -> tuple[str, str]:
        """Returns (subscript, superscript) of the symbol that was just read, such as `_B`, `²` or `^(1/4)`."""
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
        """Returns one subscript or superscript. A fraction in it is written on one line, because a drawn one would be
        too small to read."""
        token = self.take()
        if token in _OPEN:
            was_small, self.is_small = self.is_small, True
            mathml = _bare(self.group(token))
            self.is_small = was_small
            return mathml
        if not token[0].isalnum() and token not in "∞−":
            raise _Unreadable
        return _character(token) if token[0].isdigit() or len(token) == 1 else f"<mtext>{html.escape(token)}</mtext>"


def _scripted(base: str, below: str, above: str) -> str:
    """Returns a symbol with its subscript and superscript; "" stands for none."""
    if below and above:
        return f"<msubsup>{base}<mrow>{below}</mrow><mrow>{above}</mrow></msubsup>"
    if below:
        return f"<msub>{base}<mrow>{below}</mrow></msub>"
    return f"<msup>{base}<mrow>{above}</mrow></msup>" if above else base


def _bare(item: str) -> str:
    """Returns a group without its parentheses, which are needless inside a fraction or a root."""
    match = re.match(r'<mrow class="group">(<mo [^>]*>)\(</mo>', item)
    return item[match.end() : -len(f"{match[1]})</mo></mrow>")] if match else item


def _symbol(token: str) -> str:
    """Returns a letter with its accent, a differential, a function's name or a word, as MathML."""
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
    """Returns a number, a sign or a letter as MathML."""
    return f"<mn>{text}</mn>" if text[0].isdigit() else f"<mo>{text}</mo>" if text in "+−′" else f"<mi>{text}</mi>"


def blocks(markdown: str) -> str:
    """Returns the page with its indented blocks as MathML. In docs/spec.md, blocks that are indented by four spaces are
    equations."""

    def block(match: re.Match[str]) -> str:
        return division([render(line) for line in match[0].strip("\n").splitlines()]) + "\n"

    return re.sub(r"(?m)(?<=\n\n)(?:^    \S.*\n)+", block, markdown)


def division(lines: list[str]) -> str:
    """Returns rendered lines as a separate block."""
    return '<div class="equation">' + "".join(f"<div>{line}</div>" for line in lines) + "</div>"


def searchable(page: str) -> str:
    """Returns the page with each formula's source, such as `α = (2L)^(1/4)`, as hidden text. The site's search finds
    this text instead of the single letters of MathML."""

    def formula(match: re.Match[str]) -> str:
        source = re.sub(r"[_*`|]", lambda sign: f"&#{ord(sign[0])};", match[1])
        return f'<math data-search-exclude{match[0][5:]}<span class="source" aria-hidden="true">{source}</span>'

    # Spaces keep the words of neighbouring elements apart in the search index.
    spaced = page.replace('<span class="gap"></span>', '<span class="gap"></span> ').replace(
        "</div><div>", "</div> <div>"
    )
    return re.sub(r'<math [^>]*?alttext="([^"]*)"[^>]*>.*?</math>', formula, spaced)
