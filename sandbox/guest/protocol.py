"""The facts that the guest and the server must agree on: layouts of bytes, flags, bounds, and names.

The guest imports this file as `protocol`, the server as `sandbox.guest.protocol`. It is the only file of the guest that
the server imports, and it contains constants only.

    frame     header length, body length (`LENGTHS`), header, body. The header lists the lengths of the parts of the
              body. Towards the zygote it is `marshal`, version 2; towards the executor JSON, but binary for `ended`
    ended     `ENDED`, then the length of each part of the body as u64
    report    `REPORT`, then the texts in UTF-8: value, error type, message, traceback
    files     for each file `ENTRY`, then the rest: of a path the content; of a pattern the path of a file that matches
              it, NUL, the content; of the index `FIGURE_INDEX` a figure as PNG

All numbers are little-endian. The receiver checks everything, because code in a call can write any byte.
"""

from __future__ import annotations

import struct

LENGTHS = struct.Struct("<II")
ENDED = struct.Struct("<BQiiQQQB")
"""Kind (`ENDED_KIND`), run id, exit code and signal (-1: none), wall and CPU time in µs, peak memory in KiB, flags. The
kind distinguishes this header from JSON."""
ENDED_KIND = 1
STDOUT_TRUNCATED, STDERR_TRUNCATED = 1, 2
"""Flags of an `ended` header."""
REPORT = struct.Struct("<6i")
"""Length in bytes of each text (-1: no value, no error), line number of the error (-1: unknown), flags."""
VALUE_TRUNCATED, TRACEBACK_TRUNCATED, FILES_TRUNCATED, OUT_OF_MEMORY = 1, 2, 4, 8
"""Flags of a report. `OUT_OF_MEMORY` means that the code raised MemoryError."""
ENTRY = struct.Struct("<IQ")
"""Index into `return_files`, and the length of the rest of the entry."""
FIGURE_INDEX = 2**32 - 1
MAX_FILES, MAX_FIGURES = 256, 20
"""Maximum number of files that a call brings, of files that it returns, and of figures that it returns."""
MAX_PATH_BYTES = 1024
PATTERN_CHARACTERS, ANY_DIRECTORIES = "*?[", "**"
"""A pattern of `return_files` contains one of these characters. The second is the part of a pattern that stands for any
number of nested directories."""

MAX_SLOTS_PER_POOL = 4096
"""Size of the zygote's array with one byte for each slot, in which a call notes that it is confined."""
MAX_BACKLOG = 128
"""Maximum number of connections that wait for accept(2). Each can hold the data of a socket, 208 KiB, without a
descriptor, which would count towards a limit."""
MAX_ANSWER_TEXT_CHARS = 1 << 20
"""Maximum length of a gold or an answer in characters; longer ones are unparsable."""

PARENT_PROFILE: dict[str, str | None] = {
    "bare": None,
    "numeric": "bare",
    "symbolic": "numeric",
    "scientific": "symbolic",
    "verify": "symbolic",
}
"""The profile that each built-in profile extends. All but `verify` form a chain."""

SCRIPT = "main.py"
"""File with the code."""
COMPILED_FILE = "compiled"
"""File in which a call with `compile_only` returns its compiled code."""
FUNCTION_CALL_FILE = "function_call.json"
"""File with the name and the arguments of a function test."""
CHECKER_MODULE, FUNCTION_CALL_MODULE, NOTEBOOK_MODULE = "rstar_checker", "rstar_function_call", "rstar_notebook"
"""Names under which the code of a call imports modules of the guest."""
FUNCTION_CALL_LINE = f"\n__import__('{FUNCTION_CALL_MODULE}').run()\n"
"""The end of a program with a function test. The runner removes it from the file of the code."""
PRELUDE_LINE = "\n# rstar_prelude: leetcode"
"""The end of a program with the prelude, before the line of a function test."""
