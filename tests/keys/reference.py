"""A second implementation of the key derivation, written from docs/format.md to be read. It shares
no code with kvferry, and is slow."""

import struct

from blake3 import blake3


def encode(value):
    if value is None:
        return b"N" + struct.pack("<Q", 0)
    if value is True or value is False:
        return b"B" + struct.pack("<Q", 1) + (b"\x01" if value else b"\x00")
    if type(value) is int:
        size = 1
        while not -(1 << (8 * size - 1)) <= value < (1 << (8 * size - 1)):
            size += 1
        return b"I" + struct.pack("<Q", size) + value.to_bytes(size, "little", signed=True)
    if type(value) is float:
        body = b"\0\0\0\0\0\0\xf8\x7f" if value != value else struct.pack("<d", value)
        return b"F" + struct.pack("<Q", 8) + body
    if type(value) is str:
        body = value.encode("utf-8", "surrogatepass")
        return b"S" + struct.pack("<Q", len(body)) + body
    if type(value) in (list, tuple):
        return b"L" + struct.pack("<Q", len(value)) + b"".join(encode(item) for item in value)
    assert type(value) is dict
    pairs = sorted((encode(key), encode(item)) for key, item in value.items())
    # Sorted by encoding, short keys would come first; the format sorts by the bytes of the text.
    pairs.sort(key=lambda pair: pair[0][9:])
    return b"M" + struct.pack("<Q", len(pairs)) + b"".join(k + v for k, v in pairs)


def namespace_digest(description):
    return blake3(b"kvferry.space.1\0" + encode(description)).digest()


def shard_key(key, shard):
    """Return the key of a record with some rows of that of `key`. `shard` has the layers and heads
    of each component, `[first layer, last + 1, first head, last + 1]`."""
    return blake3(b"kvferry.shard.1\0" + key + encode(shard)).digest()


def draft_key(key, drafter, shard):
    """Return the key of what a drafter stores beside the chunk of `key`; `shard` as above, of the
    components of the model and of the drafter."""
    return blake3(b"kvferry.draft.1\0" + key + drafter + encode(shard)).digest()


def chunk_keys(namespace, chunk_tokens, token_ids, extra):
    """Return the keys of the whole chunks. `extra` has the form of golden.json: salt, lora, embeds
    (hex), items of [digest, offset, length]."""
    keys = []
    parent = namespace
    for start in range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        stop = start + chunk_tokens
        fields = {name: extra[name] for name in ("salt", "lora", "embeds") if name in extra}
        items = [
            [digest, offset - start, length]
            for digest, offset, length in sorted(
                extra.get("items", []), key=lambda item: (item[1], item[2], item[0])
            )
            if max(start, offset) < min(stop, offset + length)
        ]
        if items:
            fields["items"] = items
        data = b"kvferry.chunk.1\0" + parent + struct.pack("<I", chunk_tokens)
        data += struct.pack(f"<{chunk_tokens}I", *token_ids[start:stop])
        if fields:
            data += encode(fields)
        parent = blake3(data).digest()
        keys.append(parent)
    return keys
