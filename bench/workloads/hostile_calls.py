"""Calls that never end, exhaust a resource, or leave something behind if the sandbox lets them."""

from __future__ import annotations

from typing import Any

ENDLESS_LOOP = "while True: pass"
BACKGROUND_LOOP = {"code": ENDLESS_LOOP, "limits": {"timeout_s": 300.0}}
"""An endless loop whose time-out outlasts every measurement."""

RESOURCE_BOMBS = {
    "while True:\n    try: __import__('os').fork()\n    except OSError: pass": {"timeout"},
    "kept = [0]\nwhile True: kept += kept": {"memory_limit", "error"},
    "while True: print('x' * 65536)": {"output_limit"},
    "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))": {"error", "killed"},
}
"""Programs that exhaust a resource, with the statuses that each may end with under `BOMB_LIMITS`."""
BOMB_LIMITS = {"timeout_s": 1.0, "memory_mb": 64, "disk_mb": 16}

SHORT_LIMITS = {"timeout_s": 0.2}
HOSTILE_CALLS: tuple[dict[str, Any], ...] = (
    {"code": ENDLESS_LOOP, "limits": SHORT_LIMITS},
    {"code": "import time; time.sleep(60)", "limits": SHORT_LIMITS},
    {"code": "print('x' * 10_000_000)"},
    {"code": "import os; os.kill(os.getpid(), 9)"},
    {"code": "import os\nif os.fork() == 0:\n    import time; time.sleep(600)"},
    {"code": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"},
    {"code": "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(0.01,)).start()"},
    {"code": "import tempfile\nfor _ in range(20): tempfile.NamedTemporaryFile(delete=False).write(b'x' * 10_000)"},
    {"code": "import os\nfor _ in range(1000): os.memfd_create('kept')"},
    {"code": "kept = bytearray(1 << 40)"},
    {"code": "kept = [0]\nwhile True: kept += kept", "limits": {"memory_mb": 128}},
    {"code": "import ctypes; ctypes.string_at(0)"},
    {"code": "open('out.txt', 'w').write('x' * 1000)", "files": {"in.txt": b"y"}, "return_files": ["out.txt"]},
    {"code": "import socket; kept = [socket.socketpair() for _ in range(50)]"},
    {"code": "def deeper(n): return deeper(n + 1)\ndeeper(0)"},
)
"""Calls that leave processes, files, descriptors or memory behind if the sandbox does not remove them."""
