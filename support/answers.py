"""The answer in a generated text, and whether two answers are the same."""

import re
from fractions import Fraction


def extract_answer(task, text):
    """The final answer (str) in the text of a response, or None. The first `####` decides: the answer is what follows on its
    line, without marks and further sentences (`bare_answer`). What has no letter and no digit is no answer. math500: without a
    `####`, the content of the last \\boxed{}."""
    marked = re.search(r'####([^\n]*)', text)
    boxed = unboxed(text) if task == 'math500' and '\\boxed' in text else ''
    answer = bare_answer(task, marked[1] if marked else boxed)
    return answer if re.search(r'[^\W_]', answer) else None


def bare_answer(task, text):
    """An answer without Markdown's marks, which are `**`, `__` and backticks anywhere, `*` and `_` at the ends. It ends before
    a full stop that a space follows, except in hotpotqa, whose names hold such stops."""
    text = re.sub(r'\*\*|__|`', '', text).strip('*_ \t\r\n')
    return text if task == 'hotpotqa' else re.split(r'\.\s', text)[0]


def ends_answer(text):
    """Whether the line of the first `####` is complete, so that the rest of a response cannot change its answer."""
    return '\n' in text.partition('####')[2]


def same_answer(task, a, b):
    """Whether two final answers (str, or None, which nothing equals) mean the same in a task.

    Both are taken bare (`bare_answer`). Numbers by value: currency, thousands commas, trailing zeros, fractions and a unit may
    be written or left out, but two different units differ; other words beside a number make it another answer. math500: also
    LaTeX, ignoring spacing and notation, without algebra. pathfinding: the nodes. prosqa: the sentence, ignoring case and the
    full stop. hotpotqa: the words, ignoring case, punctuation and articles (SQuAD's rule).
    """
    if a is None or b is None:
        return False
    a, b = bare_answer(task, a), bare_answer(task, b)
    if task in COMPARED:
        return COMPARED[task](a) == COMPARED[task](b)
    if task == 'math500':
        a, b = plain_latex(a), plain_latex(b)
        if same_quantity(a, b):
            return True
        a, b = (re.split(r'([,()\[\]{}])', ''.join(text.split())) for text in (a, b))  # tuples, intervals, arguments
        return len(a) == len(b) and all(x == y or same_quantity(x, y) for x, y in zip(a, b, strict=True))
    return same_quantity(a, b) or ' '.join(a.split()) == ' '.join(b.split())


COMPARED = {  # what is compared of an answer that is no quantity
    'pathfinding': lambda text: re.split(r'(?:\s|,|->|>|→)+', text.strip().rstrip('.')),
    'prosqa': lambda text: ' '.join(text.lower().split()).rstrip('. '),
    'hotpotqa': lambda text: [w for w in re.sub(r'[^\w\s]', '', text.lower()).split() if w not in ('a', 'an', 'the')],
}
CURRENCIES = {'$': 'dollar', '€': 'euro', '£': 'pound', '¥': 'yen'}
SCALES = {'k': 10**3, 'dozen': 12, 'hundred': 100, 'thousand': 10**3, 'million': 10**6, 'billion': 10**9}


def quantity(text):
    """(value, unit) of a text that is one number (a Fraction) with at most a unit of three words, None of any other text."""
    match = re.fullmatch(
        r'([+-]?)([$€£¥]?)([+-]?)(\d{1,3}(?:,\d{3}){1,300}(?!\d)|\d{1,1000})?(\.\d{1,1000})?(?:/(\d{1,1000}))?'
        r'\s*(%|°|(?:[a-z]+(?:[ /-][a-z]+){0,2})?)\.?',
        text.strip().replace('−', '-').lower(),
        re.ASCII,
    )
    if not match or not (match[4] or match[5]) or (match[1] and match[3]) or not int(match[6] or 1):
        return None
    value = Fraction((match[1] or match[3]) + (match[4] or '0').replace(',', '') + (match[5] or '')) / int(match[6] or 1)
    words = [w if w.endswith('ss') else w.removesuffix('s') for w in re.split(r'[ /-]+', match[7]) if w]
    if words and words[0] in SCALES:
        value *= SCALES[words.pop(0)]
    unit = ' '.join({'%': 'percent', '°': 'degree'}.get(w, w) for w in words)
    return value, unit or CURRENCIES.get(match[2], '')


def same_quantity(a, b):
    """Whether two texts are the same number, in the same unit unless one of them leaves it out."""
    a, b = quantity(a), quantity(b)
    return bool(a and b) and a[0] == b[0] and (a[1] == b[1] or not (a[1] and b[1]))


def unboxed(text):
    """The content of the last \\boxed{..} in a text, braces balanced; the text itself if there is none or it never closes."""
    start = text.rfind('\\boxed{')
    depth = 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += {'{': 1, '}': -1}.get(text[i], 0)
        if not depth:
            return text[start + 7 : i]
    return text


def plain_latex(text):
    """A final answer with one spelling for what LaTeX can spell in several: fractions, roots, spacing, text, units, `x =`."""
    text = unboxed(text).strip().removesuffix('.')
    text = re.sub(r'\\[()\[\]]|(?<!\\)\$|\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\ |~', '', text)
    text = re.sub(r'\^\{?\\circ\}?', '°', text)
    text = re.sub(r'\\([%$])', r'\1', text).replace('\\cdot', '*').replace('{,}', ',')
    text = re.sub(r'\\[dt]frac', r'\\frac', text)
    text = re.sub(r'(?<=\d)\s+([a-zA-Z]{3}[a-zA-Z ]*)$', r'\\text{\1}', text)  # a unit; fewer letters are variables
    parts = re.split(r'\\(?:text|mbox|textbf|textrm|mathrm)\s*\{([^{}]*)\}', text)  # every second part is words
    text = ''.join(' ' + part.strip() if i % 2 else ''.join(part.split()) for i, part in enumerate(parts)).strip()
    text = re.sub(r'\\frac(\d)(\d)', r'\\frac{\1}{\2}', text)
    text = re.sub(r'\\frac(\d)\{', r'\\frac{\1}{', text)
    text = re.sub(r'\\frac\{([^{}]+)\}(\d)', r'\\frac{\1}{\2}', text)
    mixed = r'(?<![\w.}^])(\d{1,100})\\frac\{(\d{1,100})\}\{(\d{1,100})\}'
    text = re.sub(mixed, lambda m: f'{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}', text)
    text = re.sub(r'(?<![\w.}])\\frac\{(\d+)\}\{(\d+)\}', r'\1/\2', text)
    text = re.sub(r'([\^_])\{(\w)\}', r'\1\2', text)
    text = re.sub(r'\\sqrt(\w)', r'\\sqrt{\1}', text)
    text = re.sub(r'^[a-zA-Z](?:=|\\in(?![a-z]))', '', text)
    return re.sub(r'(?<=[\d}])(?=[a-zA-Z])', '*', text)  # 2x is a product, not two of the unit x
