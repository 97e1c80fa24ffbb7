from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfeed.rewards.code.grader import find_program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\n", "a\n"),
        ("```Python3\na\n```", "a\n"),
        ("  ```python\n  a\n  ```", "a\n"),
        ("1. So:\n\n    ```python\n    if a:\n        b\n    ```", "if a:\n    b\n"),
        ("  ```python\na\n  ```", "a\n"),
        ("```python title=main.py\na\n```", "a\n"),
        ("```Python 3\na\n```", "a\n"),
        ("```{.python}\na\n```", "a\n"),
        ("``` python\na\n```", "a\n"),
        ("```cpp\na\n```", None),
        ("```python\na\n```\nIn C++:\n```cpp\nb\n```", "a\n"),
        ("```python\na\n```python\nb\n```", "b\n"),
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    f()\n    ```\n    """\n',
        ),
        ("~~~~~~~~~~\n```python\na\n```\n", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```python\r\na\r\n```\r\n", "a\n"),
        ("```python\nfirst\n```\n```python\nlast\n```", "last\n"),
        ("```python\na\n```\nIt prints\n```text\n5\n```", "a\n"),
        ("```python\na\n```\nRun it:\n```bash\npython a.py\n```", "a\n"),
        ("<think>\n```python\ndraft\n```</think>```python\na\n```", "a\n"),
        ("<think>\n```python\ndraft\n```\n</think>\n```python\na\n```", "a\n"),
        ("<think>\n```python\ndraft\n```\n</think>\nnone", None),
        ("<think>\n```python\ndraft\n```\n", None),
        ("```python\na", None),
        ("```python\na\n```\nFixed:\n```python\nb", None),
        ("```python\n\n```", None),
        ("`a`", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_complete_block_of_python(response: str, program: str | None) -> None:
    assert find_program(response) == program


@given(st.text(alphabet="`~python \n<>think/a", max_size=300))
@settings(max_examples=500, deadline=None)
def test_no_text_is_too_odd(text: str) -> None:
    found = find_program(text)
    assert found is None or found.strip()


def test_a_program_of_absurd_length_is_none() -> None:
    assert find_program("```python\n" + "a" * 100_001 + "\n```") is None
