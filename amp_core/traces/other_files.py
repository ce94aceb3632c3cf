"""What a file is that is no Chrome trace, by its ending or its first bytes.

>>> told(Path("report.nsys-rep"), b"\x00\x01")
'a report of Nsight Systems; record with torch.profiler and give the file that export_chrome_trace writes'
"""

from pathlib import Path

_RECORD = "record with torch.profiler and give the file that export_chrome_trace writes"
_UNPACK = "unpack it and give the traces in it"

_BY_ENDING = {
    ".tar": f"an archive; {_UNPACK}",
    ".tgz": f"an archive; {_UNPACK}",
    ".nsys-rep": f"a report of Nsight Systems; {_RECORD}",
    ".qdrep": f"a report of Nsight Systems; {_RECORD}",
    ".ncu-rep": f"a report of Nsight Compute; {_RECORD}",
    ".pftrace": f"a binary trace of Perfetto; {_RECORD}",
    ".perfetto-trace": f"a binary trace of Perfetto; {_RECORD}",
    ".xplane.pb": f"a profile of XLA; {_RECORD}",
}
_BY_FIRST_BYTES = {
    b"PK\x03\x04": f"a zip archive; {_UNPACK}",
    b"\x28\xb5\x2f\xfd": f"compressed with zstd; {_UNPACK}",
    b"BZh": f"compressed with bzip2; {_UNPACK}",
    b"\xfd7zXZ": f"compressed with xz; {_UNPACK}",
    b"SQLite format 3\0": f"a database, such as Nsight Systems exports; {_RECORD}",
    # The second byte is the protocol, 2 to 5: of other bytes above 127, few begin any file.
    **{
        bytes([0x80, protocol]): "a pickle of Python, such as a memory snapshot, which https://pytorch.org/memory_viz "
        f"shows; for AMPscope, {_RECORD}"
        for protocol in range(2, 6)
    },
}
"""Signatures as the `file` command's database lists them, and the opcode PROTO of pickles."""


def told(path: Path, first: bytes) -> str:
    """What the file is and what to do with it; empty if neither its name nor its `first` bytes tell."""
    name = path.name.lower()
    by_ending = next((what for ending, what in _BY_ENDING.items() if ending in name), "")
    return by_ending or next((what for begin, what in _BY_FIRST_BYTES.items() if first.startswith(begin)), "")
