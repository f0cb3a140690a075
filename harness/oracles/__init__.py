"""One module a kind of judgement. Each law is a function from ``Evidence`` to reasons; its docstring says it in one sentence."""
