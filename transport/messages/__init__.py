"""Every message that crosses a process border, in one versioned place.

A message on the wire is `[header][payload frame ...]`: the header is one of the structs below,
msgpack-encoded as a tagged array; bulk data (token ids, logprobs, prompt bodies) follows in raw
frames that are never copied into the header. `doc/wire_protocol.md` tells the same as a table.

Fields are only ever appended: the array form is positional. `PROTOCOL_VERSION` changes when an
old peer could misread a new message; peers of another version refuse each other in `Hello`.
"""
