"""The constants that the guest and the server must agree on: layouts of bytes, flags, bounds, and names.

The guest is the code that runs inside a jail. It imports this file as `protocol`, and the server imports it as
`sandbox.guest.protocol`. The server imports no other file of the guest. This file contains constants only.

The executor (outside the jail) and a zygote (inside, a preloaded interpreter that forks once per call) exchange frames
over a socket. When a call has ended, its zygote sends a frame `ended`. The body of this frame contains the report and
the returned files, both written by the process of the call.

    what is sent                consists of
    frame, either direction     header length and body length (`LENGTHS`), the header, the body. The header contains the
                                lengths of the parts of the body
    header, executor to zygote  `marshal` data, version 2
    header, zygote to executor  JSON; but the header of `ended` is `ENDED`, then the length of each part of the body as
                                u64
    report                      `REPORT`, then four texts in UTF-8: value, error type, message, traceback
    returned files              a list of entries. An entry is `ENTRY` and the rest:
                                - if `ENTRY` has the index of a path: the content of the file
                                - if it has the index of a pattern: the path of a matching file, NUL, the content
                                - if it has the index `FIGURE_INDEX`: a figure as PNG

All numbers are little-endian. The receiver checks everything, because code in a call can write any byte.
"""

from __future__ import annotations

import struct

LENGTHS = struct.Struct("<II")
"""Length of a frame's header and length of its body, in bytes."""
ENDED = struct.Struct("<BQiiQQQB")
"""Kind (`ENDED_KIND`), run id, exit code (-1: none), signal (-1: none), wall time in µs, CPU time in µs, peak memory in
KiB, flags."""
ENDED_KIND = 1
"""First byte of an `ended` header. No JSON text starts with this byte."""
STDOUT_TRUNCATED = 1
"""Flag of an `ended` header: the call wrote more to stdout than its limit allows."""
STDERR_TRUNCATED = 2
"""Flag of an `ended` header: the call wrote more to stderr than its limit allows."""
REPORT = struct.Struct("<6i")
"""Length in bytes of each of the four texts, line number of the error (-1: unknown), flags. The length of the value is
-1 if there is no value, and the length of the error type is -1 if there is no error."""
VALUE_TRUNCATED = 1
"""Flag of a report: the value is longer than the limit, and its end is left out."""
TRACEBACK_TRUNCATED = 2
"""Flag of a report: the traceback is longer than the limit, and its beginning is left out."""
FILES_TRUNCATED = 4
"""Flag of a report: some files or figures are left out, for example because they are too large."""
OUT_OF_MEMORY = 8
"""Flag of a report: the code raised MemoryError."""
ENTRY = struct.Struct("<IQ")
"""Index into the call's list `return_files`, and the length in bytes of the rest of the entry."""
FIGURE_INDEX = 2**32 - 1
"""Index in the entry of a figure, which belongs to no path of `return_files`."""
MAX_FILES = 256
"""Maximum number of files that a call brings. It is also the maximum number of files that a call returns."""
MAX_FIGURES = 20
"""Maximum number of figures that a call returns."""
MAX_PATH_BYTES = 1024
"""Maximum length of the path of a file that a call brings or returns."""
PATTERN_CHARACTERS = "*?["
"""An item of `return_files` that contains one of these characters is a pattern. Any other item is a path."""
ANY_DIRECTORIES = "**"
"""The part of a pattern, between two slashes, that stands for any number of nested directories."""

MAX_SLOTS_PER_POOL = 4096
"""Maximum number of slots of a zygote pool. A slot is a numbered set of resources for one call at a time. A pool is one
jail with its zygotes, which share the slots. A zygote has an array of this many bytes, one for each slot, in which a
call notes that it is confined."""
MAX_BACKLOG = 128
"""Maximum number of connections that may wait for accept(2) on a socket of a call. A waiting connection can hold
208 KiB of data without a descriptor, so the limit on descriptors does not bound this memory."""
MAX_LOST = 20
"""Maximum number of names of what a cell of a session has left behind and is lost."""
MAX_ANSWER_TEXT_CHARS = 1 << 20
"""Maximum length of a gold (the right answer) or of an answer, in characters. A longer text counts as unparsable."""

PARENT_PROFILE: dict[str, str | None] = {
    "bare": None,
    "numeric": "bare",
    "symbolic": "numeric",
    "scientific": "symbolic",
    "verify": "symbolic",
}
"""By built-in profile: the profile that it extends, or None. A profile is a set of modules that a zygote has imported
before it forks calls. A profile contains all modules of the profile that it extends. All profiles but `verify` form a
chain."""

CALL_DIR_PREFIX = "rstar-call-"
"""Start of the name of a call's working directory at level `none`. The directory is in /tmp. While the call runs, its
zygote holds a lock (flock(2)) on the directory. So a directory without a lock is left over from a killed zygote."""
SCRIPT = "main.py"
"""Name of the file with the code of a call."""
COMPILED_FILE = "compiled"
"""Name of the file in which a call with `compile_only` returns its compiled code."""
FUNCTION_CALL_FILE = "function_call.json"
"""Name of the file with the name of a function and its arguments, for a function test. A function test checks what a
function of a judged program returns, instead of what the program prints."""
ANSWER_CHECK_MODULE = "rstar_answer_check"
"""Name under which the code of a call imports `answer_check.py` of the guest."""
FUNCTION_CALL_MODULE = "rstar_function_call"
"""Name under which the code of a call imports `function_call.py` of the guest."""
NOTEBOOK_MODULE = "rstar_notebook"
"""Name under which the code of a call imports `notebook.py` of the guest."""
FUNCTION_CALL_LINE = f"\n__import__('{FUNCTION_CALL_MODULE}').run()\n"
"""The line that the server appends to a program for a function test. It calls the function. The file of the code does
not contain this line, so a child process that runs the file calls no function."""
PRELUDE_LINE = "\n# rstar_prelude: leetcode"
"""The comment that the server appends to a program that needs the prelude (`prelude.py`): names that LeetCode gives to
a solution without imports. The guest reads this comment and adds the names before it runs the program. In a function
test, `FUNCTION_CALL_LINE` follows the comment."""
