# ruff: noqa: E501
"""Bad recipes and exactly what is said about each: (what is wrong, content, the lines after ``FILE:``).

One table, longer than other files because every message is written out as a user reads it.
"""

from __future__ import annotations

HEAD = "version: 1\nname: a\nmodel: {source: x}\nbackend: {kind: embedded}\n"

BAD_RECIPES: list[tuple[str, str | bytes, list[str]]] = [
    (
        "unknown key, close",
        HEAD + "limits:\n  max_batchsize: 4\n",
        [
            "6: limits.max_batchsize: unknown key; allowed here: max_batch_size, max_input_tokens, max_seq_tokens, max_num_tokens, kv_cache_bytes; did you mean max_batch_size?"
        ],
    ),
    (
        "unknown key, far",
        HEAD + "banana: 4\n",
        [
            "5: banana: unknown key; allowed here: version, name, description, model, backend, quantization, speculation, acceptance, limits, parallel, serving, gates; remove it"
        ],
    ),
    (
        "unknown key, other section",
        HEAD + "limits:\n  tp: 2\n",
        [
            "6: limits.tp: unknown key; allowed here: max_batch_size, max_input_tokens, max_seq_tokens, max_num_tokens, kv_cache_bytes; it belongs under parallel; move it there"
        ],
    ),
    (
        "unknown key, belongs to the top",
        HEAD + "limits:\n  description: 2\n",
        [
            "6: limits.description: unknown key; allowed here: max_batch_size, max_input_tokens, max_seq_tokens, max_num_tokens, kv_cache_bytes; it belongs under the top level; move it there"
        ],
    ),
    (
        "unknown key, other kind",
        HEAD + "speculation:\n  kind: ngram\n  window: 4\n",
        [
            "7: speculation.window: unknown key; allowed here: kind, num_draft_tokens, min_ngram, max_ngram, branches, corpus, corpus_min_count, max_concurrency, adaptive; it belongs to kind: lookahead, not to kind: ngram; remove it or change the kind"
        ],
    ),
    (
        "unknown key, several other kinds",
        HEAD + "speculation:\n  kind: none\n  num_draft_tokens: 4\n",
        [
            "7: speculation.num_draft_tokens: unknown key; allowed here: kind; it belongs to kind: ngram or kind: draft_model or kind: eagle or kind: eagle3, not to kind: none; remove it or change the kind"
        ],
    ),
    (
        "unknown key, wrong case",
        HEAD + "Gates: {lossless: true}\n",
        [
            "5: Gates: unknown key; allowed here: version, name, description, model, backend, quantization, speculation, acceptance, limits, parallel, serving, gates; did you mean gates?"
        ],
    ),
    (
        "unknown key, homoglyph",
        HEAD + "limits:\n  m\u0430x_x: 4\n",
        [
            "6: limits.mаx_x: unknown key; allowed here: max_batch_size, max_input_tokens, max_seq_tokens, max_num_tokens, kv_cache_bytes; it contains U+0430 CYRILLIC SMALL LETTER A; remove it"
        ],
    ),
    (
        "unknown key in a nested union",
        HEAD
        + "speculation:\n  kind: draft_model\n  model: {source: y}\n  quantization: {kind: fp8, group_size: 64}\n",
        [
            "8: speculation.quantization.group_size: unknown key; allowed here: kind, kv_cache, lm_head, exclude, calibration; it belongs to kind: w4a16_awq or kind: w4a8_awq, not to kind: fp8; remove it or change the kind"
        ],
    ),
    (
        "text for a number",
        HEAD + "limits: {max_batch_size: many}\n",
        [
            "5: limits.max_batch_size: found 'many'; allowed: a whole number from 1 to 8192; write a whole number"
        ],
    ),
    (
        "quoted number",
        HEAD + 'limits: {max_batch_size: "8"}\n',
        [
            "5: limits.max_batch_size: found '8'; allowed: a whole number from 1 to 8192; write 8 without quotes"
        ],
    ),
    (
        "number with underscore",
        HEAD + "limits: {max_batch_size: 1_000}\n",
        ["5: limits.max_batch_size: found '1_000'; allowed: a whole number from 1 to 8192; write 1000"],
    ),
    (
        "octal",
        HEAD + "limits: {max_batch_size: 010}\n",
        ["5: limits.max_batch_size: found '010'; allowed: a whole number from 1 to 8192; write 10"],
    ),
    (
        "hexadecimal",
        HEAD + "limits: {max_batch_size: 0x10}\n",
        [
            "5: limits.max_batch_size: found '0x10'; allowed: a whole number from 1 to 8192; write a whole number"
        ],
    ),
    (
        "sexagesimal",
        HEAD + "limits: {max_batch_size: 1:30}\n",
        [
            "5: limits.max_batch_size: found '1:30'; allowed: a whole number from 1 to 8192; write a whole number"
        ],
    ),
    (
        "float for a whole number",
        HEAD + "limits: {max_batch_size: 8.5}\n",
        ["5: limits.max_batch_size: found 8.5; allowed: a whole number from 1 to 8192; write 8"],
    ),
    (
        "exponent for a whole number",
        HEAD + "limits: {max_num_tokens: 1e3}\n",
        ["5: limits.max_num_tokens: found 1000.0; allowed: a whole number from 1 to 16777216; write 1000"],
    ),
    (
        "boolean for a whole number",
        HEAD + "limits: {max_batch_size: true}\n",
        [
            "5: limits.max_batch_size: found true; allowed: a whole number from 1 to 8192; write a whole number"
        ],
    ),
    (
        "boolean for the version",
        HEAD.replace("version: 1", "version: true"),
        ["1: version: found true; allowed: 1; write 1"],
    ),
    (
        "float for the version",
        HEAD.replace("version: 1", "version: 1.0"),
        ["1: version: found 1.0; allowed: 1; write 1"],
    ),
    ("other version", HEAD.replace("version: 1", "version: 2"), ["1: version: found 2; allowed: 1; write 1"]),
    (
        "boolean for a number",
        HEAD + "quantization: {kind: w8a8_sq, alpha: true}\n",
        ["5: quantization.alpha: found true; allowed: a number from 0 to 1; write a number"],
    ),
    (
        "too small",
        HEAD + "limits: {max_batch_size: 0}\n",
        ["5: limits.max_batch_size: found 0; allowed: a whole number from 1 to 8192; raise it to 1 or more"],
    ),
    (
        "too large",
        HEAD + "limits: {max_batch_size: 9000}\n",
        [
            "5: limits.max_batch_size: found 9000; allowed: a whole number from 1 to 8192; lower it to 8192 or less"
        ],
    ),
    (
        "not above",
        HEAD + "gates: {min_speedup: 0}\n",
        ["5: gates.min_speedup: found 0; allowed: a number above 0, at most 1000, or null; raise it above 0"],
    ),
    (
        "nan",
        HEAD + "gates: {min_speedup: .nan}\n",
        [
            "5: gates.min_speedup: found .nan; allowed: a number above 0, at most 1000, or null; write a number"
        ],
    ),
    (
        "infinity",
        HEAD + "gates: {min_speedup: -.inf}\n",
        [
            "5: gates.min_speedup: found -.inf; allowed: a number above 0, at most 1000, or null; write a number"
        ],
    ),
    (
        "infinity by overflow",
        HEAD + "gates: {min_speedup: 1e999}\n",
        [
            "5: gates.min_speedup: found .inf; allowed: a number above 0, at most 1000, or null; write a number"
        ],
    ),
    (
        "very large integer",
        HEAD + "limits: {max_batch_size: " + "9" * 39 + "}\n",
        [
            "5: limits.max_batch_size: found 999999999999999999999999999999999999999; allowed: a whole number from 1 to 8192; lower it to 8192 or less"
        ],
    ),
    (
        "huge integer",
        HEAD + "limits: {max_batch_size: " + "9" * 5000 + "}\n",
        ["5: limits.max_batch_size: a number of 5000 digits; allowed: at most 40; write a smaller one"],
    ),
    (
        "yes for a boolean",
        HEAD + "gates: {lossless: yes}\n",
        ["5: gates.lossless: found 'yes'; allowed: true or false; write true"],
    ),
    (
        "off for a boolean",
        HEAD + "gates: {lossless: off}\n",
        ["5: gates.lossless: found 'off'; allowed: true or false; write false"],
    ),
    (
        "quoted boolean",
        HEAD + "gates: {lossless: 'true'}\n",
        ["5: gates.lossless: found 'true'; allowed: true or false; write true without quotes"],
    ),
    (
        "number for a boolean",
        HEAD + "gates: {lossless: 1}\n",
        ["5: gates.lossless: found 1; allowed: true or false; write true or false"],
    ),
    (
        "boolean for a text",
        HEAD + "description: true\n",
        ["5: description: found true; allowed: text; put it in quotes"],
    ),
    (
        "number for a text",
        HEAD + "description: 1.0\n",
        ["5: description: found 1.0; allowed: text; put it in quotes"],
    ),
    (
        "null for a text",
        HEAD + "description:\n",
        ["5: description: found nothing; allowed: text; give it a value"],
    ),
    (
        "mapping for a text",
        HEAD + "description: {a: 1}\n",
        ["5: description: found a mapping; allowed: text; write one text"],
    ),
    (
        "no for a choice",
        HEAD + "quantization: {kind: none, kv_cache: no}\n",
        ["5: quantization.kv_cache: found 'no'; allowed: one of none, fp8, int8, nvfp4; did you mean none?"],
    ),
    (
        "wrong choice, close",
        HEAD + "quantization: {kind: none, kv_cache: FP8}\n",
        ["5: quantization.kv_cache: found 'FP8'; allowed: one of none, fp8, int8, nvfp4; did you mean fp8?"],
    ),
    (
        "wrong choice of numbers",
        HEAD + "quantization: {kind: w4a16_awq, group_size: 16}\n",
        ["5: quantization.group_size: found 16; allowed: one of 32, 64, 128; choose one of them"],
    ),
    (
        "quoted choice of numbers",
        HEAD + "quantization: {kind: w4a16_awq, group_size: '64'}\n",
        ["5: quantization.group_size: found '64'; allowed: one of 32, 64, 128; write 64 without quotes"],
    ),
    (
        "wrong kind",
        HEAD + "quantization: {kind: awq}\n",
        [
            "5: quantization.kind: found 'awq'; allowed: one of none, fp8, w4a16_awq, w4a8_awq, w8a8_sq, nvfp4; did you mean w4a16_awq or w4a8_awq?"
        ],
    ),
    (
        "wrong kind, far",
        HEAD + "acceptance: {kind: greedy}\n",
        ["5: acceptance.kind: found 'greedy'; allowed: one of exact, rejection, typical; choose one of them"],
    ),
    (
        "null kind",
        HEAD + "speculation: {kind: ~}\n",
        [
            "5: speculation.kind: found nothing; allowed: one of none, ngram, lookahead, draft_model, medusa, eagle, eagle3; choose one of them"
        ],
    ),
    (
        "list as a kind",
        HEAD + "speculation: {kind: [ngram]}\n",
        [
            "5: speculation.kind: found a list; allowed: one of none, ngram, lookahead, draft_model, medusa, eagle, eagle3; choose one of them"
        ],
    ),
    (
        "missing kind",
        HEAD + "speculation: {num_draft_tokens: 4}\n",
        [
            "5: speculation.kind: missing; allowed: one of none, ngram, lookahead, draft_model, medusa, eagle, eagle3; add it"
        ],
    ),
    (
        "kind without its mapping",
        HEAD + "quantization: fp8\n",
        [
            "5: quantization: found 'fp8'; allowed: a mapping with kind: none, fp8, w4a16_awq, w4a8_awq, w8a8_sq, nvfp4; write kind: fp8 on an indented line below it"
        ],
    ),
    (
        "other text without a mapping",
        HEAD + "quantization: eight\n",
        [
            "5: quantization: found 'eight'; allowed: a mapping with kind: none, fp8, w4a16_awq, w4a8_awq, w8a8_sq, nvfp4; indent its keys below it"
        ],
    ),
    (
        "empty section",
        HEAD + "limits:\n",
        [
            "5: limits: found nothing; allowed: a mapping with the keys max_batch_size, max_input_tokens, max_seq_tokens, max_num_tokens, kv_cache_bytes; indent its keys below it, or remove it"
        ],
    ),
    (
        "list for a section",
        HEAD + "limits: [1, 2]\n",
        [
            "5: limits: found a list; allowed: a mapping with the keys max_batch_size, max_input_tokens, max_seq_tokens, max_num_tokens, kv_cache_bytes; indent its keys below it"
        ],
    ),
    (
        "text for a list",
        HEAD + "quantization: {kind: fp8, exclude: lm_head}\n",
        ["5: quantization.exclude: found 'lm_head'; allowed: a list of text; write it as [a, b]"],
    ),
    (
        "wrong item of a list",
        HEAD + "quantization: {kind: fp8, exclude: [lm_head, 3, '']}\n",
        [
            "5: quantization.exclude[1]: found 3; allowed: text, not empty; put it in quotes",
            "5: quantization.exclude[2]: found ''; allowed: text, not empty; fill it in",
        ],
    ),
    (
        "wrong item of a list of lists",
        HEAD + "speculation: {kind: medusa, heads: h, choices: [[0], [0, x], 1]}\n",
        [
            "5: speculation.choices[1][1]: found 'x'; allowed: a whole number from 0 to 255; write a whole number",
            "5: speculation.choices[2]: found 1; allowed: a list of whole numbers from 0 to 255; write it as [a, b]",
        ],
    ),
    (
        "missing keys",
        "description: nothing else\n",
        [
            "1: version: missing; allowed: 1; add it",
            "1: name: missing; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; add it",
            "1: model: missing; allowed: a mapping with the keys source, revision; add it",
            "1: backend: missing; allowed: a mapping with kind: embedded, tensorrt, pytorch; add it",
        ],
    ),
    (
        "missing nested key",
        HEAD + "speculation: {kind: eagle3}\n",
        ["5: speculation.heads: missing; allowed: text, not empty; add it"],
    ),
    (
        "name with capital letters",
        HEAD.replace("name: a", "name: Chat"),
        [
            "2: name: found 'Chat'; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; for example chat"
        ],
    ),
    (
        "name of another script",
        HEAD.replace("name: a", "name: чат"),
        [
            "2: name: found 'чат'; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; replace U+0447 CYRILLIC SMALL LETTER CHE"
        ],
    ),
    (
        "name with a slash",
        HEAD.replace("name: a", "name: ../a"),
        [
            "2: name: found '../a'; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; for example a"
        ],
    ),
    (
        "name too long",
        HEAD.replace("name: a", "name: " + "a" * 64),
        [
            "2: name: found 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; for example aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
        ],
    ),
    (
        "name with a newline",
        HEAD.replace("name: a", 'name: "a\\nb"'),
        [
            "2: name: found 'a\\nb'; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; for example a-b"
        ],
    ),
    (
        "empty name",
        HEAD.replace("name: a", "name: ''"),
        [
            "2: name: found ''; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; fill it in"
        ],
    ),
    (
        "empty source",
        HEAD.replace("{source: x}", "{source: ''}"),
        ["3: model.source: found ''; allowed: text, not empty; fill it in"],
    ),
    (
        "duplicate key",
        HEAD + "limits:\n  max_batch_size: 4\n  max_batch_size: 8\n",
        ["7: limits.max_batch_size: given twice, first on line 6; allowed: once; keep one"],
    ),
    (
        "duplicate section",
        HEAD + "name: b\n",
        ["5: name: given twice, first on line 2; allowed: once; keep one"],
    ),
    (
        "duplicate section, longer",
        HEAD + "limits: {max_batch_size: 4}\ngates:\n  lossless: true\nlimits:\n  max_num_tokens: 99\n",
        ["8: limits: given twice, first on line 5; allowed: once; keep one"],
    ),
    (
        "tab in the indentation",
        HEAD + "limits:\n\tmax_batch_size: 4\n",
        ["6: found a tab in the indentation; allowed: spaces; replace it with spaces"],
    ),
    (
        "tab after a colon",
        HEAD + "description:\tx\n",
        ["5: found a tab; allowed: spaces between key and value; replace it with a space"],
    ),
    ("empty file", "", ["1: the file is empty; allowed: a recipe; write one with: trtspec init"]),
    (
        "only comments",
        "# nothing\n\n",
        ["1: the file is empty; allowed: a recipe; write one with: trtspec init"],
    ),
    (
        "a list at the top",
        "- version: 1\n",
        ["1: found a list at the top; allowed: a mapping (version:, name:, model: ...); add the keys"],
    ),
    (
        "text at the top",
        "hello\n",
        ["1: found 'hello' at the top; allowed: a mapping (version:, name:, model: ...); add the keys"],
    ),
    (
        "two documents",
        HEAD + "---\n" + HEAD,
        ["5: a second document starts; allowed: one recipe per file; split the file"],
    ),
    (
        "anchor and alias",
        HEAD + "description: &x hello\nserving: {host: *x}\n",
        [
            "5: description: anchor &x; recipes are flat on purpose; remove it",
            "6: serving.host: alias *x; recipes are flat on purpose; write the value out",
        ],
    ),
    (
        "merge key",
        HEAD + "limits:\n  <<: {max_batch_size: 4}\n",
        ["6: limits: merge key <<; recipes are flat on purpose; write the keys out"],
    ),
    ("tag", HEAD + "description: !!str 5\n", ["5: description: tag !!str; recipes use none; remove it"]),
    (
        "own tag",
        HEAD + "description: !include x.yaml\n",
        ["5: description: tag !include; recipes use none; remove it"],
    ),
    (
        "python tag",
        HEAD + "description: !!python/object/apply:os.system [ls]\n",
        ["5: description: tag !!python/object/apply:os.system; recipes use none; remove it"],
    ),
    (
        "complex key",
        HEAD + "? [a, b]\n: 1\n",
        ["5: a list, mapping or alias as a key; allowed: plain words; see recipes/reference.yaml"],
    ),
    (
        "bad indentation",
        HEAD + "limits:\n    max_batch_size: 4\n  max_num_tokens: 99\n",
        ["7: not valid YAML: found indentation that fits no key above; align it with its neighbours"],
    ),
    (
        "key indented below a value",
        HEAD + "limits:\n  max_batch_size: 4\n    max_num_tokens: 99\n",
        [
            "7: not valid YAML: found a key indented deeper than the keys above it; align it with its neighbours, or end the line above with ':' if it belongs under it"
        ],
    ),
    (
        "second colon",
        HEAD + "description: a: b\n",
        ["5: not valid YAML: found a second ': ' on the line; put text that contains ': ' in quotes"],
    ),
    (
        "open quote",
        HEAD + "description: 'a\n",
        ["5: not valid YAML: found text in quotes that never ends; close the quote"],
    ),
    (
        "open bracket",
        HEAD + "quantization: {kind: fp8, exclude: [a\n",
        ["5: not valid YAML: found a list or mapping in brackets that is not closed; close it"],
    ),
    (
        "no colon",
        HEAD + "limits\ngates: {}\n",
        ["5: not valid YAML: found a line that is neither 'key: value' nor '- item'; add the ':'"],
    ),
    (
        "at sign",
        HEAD + "description: @x\n",
        ["5: not valid YAML: found a character that cannot start a value; put the text in quotes"],
    ),
    (
        "bad escape",
        HEAD + 'description: "\\q"\n',
        ["5: not valid YAML: found an unknown \\ escape in double quotes; double it or use single quotes"],
    ),
    (
        "escape beyond Unicode",
        HEAD + 'description: "\\UFFFFFFFF"\n',
        ["5: not valid YAML: an escape or directive with an impossible number; remove it"],
    ),
    (
        "escaped NUL",
        HEAD + 'description: "a\\0b"\n',
        ["5: description: found the character U+0000 NUL; allowed: printable text; remove it"],
    ),
    (
        "lone surrogate",
        HEAD + 'description: "\\ud800"\n',
        ["5: description: found the character U+D800; allowed: printable text; remove it"],
    ),
    (
        "NUL",
        HEAD + "description: a\0b\n",
        ["5: found the character U+0000 NUL; allowed: printable text; remove it"],
    ),
    (
        "escape character",
        HEAD + "description: \x1b[31m\n",
        ["5: found the character U+001B ESCAPE; allowed: printable text; remove it"],
    ),
    (
        "bidirectional override",
        HEAD + "description: a\u202eb\n",
        ["5: found the character U+202E RIGHT-TO-LEFT OVERRIDE; allowed: printable text; remove it"],
    ),
    (
        "line separator",
        HEAD + "description: a\u2028b\n",
        ["5: found the character U+2028 LINE SEPARATOR; allowed: printable text; remove it"],
    ),
    (
        "zero-width space in a key",
        HEAD + "limits:\n  max_batch\u200b_size: 4\n",
        ["6: found the character U+200B ZERO WIDTH SPACE; allowed: printable text; remove it"],
    ),
    (
        "lone carriage return",
        HEAD.replace("\n", "\r"),
        ["1: found the character U+000D CARRIAGE RETURN; allowed: printable text; remove it"],
    ),
    (
        "not UTF-8",
        HEAD.encode() + b"description: caf\xe9\n",
        ["5: byte 0xe9 is not UTF-8; allowed: UTF-8; save it as UTF-8"],
    ),
    ("UTF-16", HEAD.encode("utf-16"), ["1: the file is UTF-16; allowed: UTF-8; save it as UTF-8"]),
    ("binary", bytes(range(256)), ["2: byte 0x80 is not UTF-8; allowed: UTF-8; save it as UTF-8"]),
    (
        "nested deeply",
        HEAD + "description: " + "[" * 1000 + "]" * 1000 + "\n",
        ["5: description[0][0][0]: nested more than 16 deep; allowed: 4; see recipes/reference.yaml"],
    ),
    (
        "nested deeply without end",
        HEAD + "description: " + "[" * 100000,
        ["5: description[0][0][0]: nested more than 16 deep; allowed: 4; see recipes/reference.yaml"],
    ),
    (
        "nested deeply in blocks",
        HEAD + "".join(" " * i + "a:\n" for i in range(40)),
        ["22: a.a.a.a: nested more than 16 deep; allowed: 4; see recipes/reference.yaml"],
    ),
    (
        "many values",
        HEAD + "quantization: {kind: fp8, exclude: [" + "a," * 12000 + "]}\n",
        ["5: more than 10000 values; a recipe has about a hundred; is this a recipe?"],
    ),
    (
        "many errors",
        "".join(f"key{i}: 1\n" for i in range(3)) + HEAD.replace("name: a", "name: A"),
        [
            "1: key0: unknown key; allowed here: version, name, description, model, backend, quantization, speculation, acceptance, limits, parallel, serving, gates; remove it",
            "2: key1: unknown key; allowed here: version, name, description, model, backend, quantization, speculation, acceptance, limits, parallel, serving, gates; remove it",
            "3: key2: unknown key; allowed here: version, name, description, model, backend, quantization, speculation, acceptance, limits, parallel, serving, gates; remove it",
            "5: name: found 'A'; allowed: a-z, 0-9, '.', '_' and '-', a letter or digit first, at most 63 characters; for example a",
        ],
    ),
    (
        "rule beside a schema error",
        HEAD + "limits: {max_batch_size: 8, max_num_tokens: 4}\ngates: {lossless: maybe}\n",
        [
            "5: limits.max_num_tokens: found 4; a batch of 8 needs as many rows; raise it to 8 or more [limits-rows-batch]",
            "6: gates.lossless: found 'maybe'; allowed: true or false; write true or false",
        ],
    ),
    (
        "rule of a section with an error",
        HEAD + "limits: {max_batch_size: 8, max_num_tokens: 4, max_seq_tokens: x}\n",
        [
            "5: limits.max_seq_tokens: found 'x'; allowed: a whole number from 1 to 16777216; write a whole number"
        ],
    ),
    (
        "too many items",
        HEAD + "speculation: {kind: medusa, heads: h, choices: [" + "[0]," * 300 + "]}\n",
        [
            "5: speculation.choices: found a list; allowed: a list of lists of whole numbers from 0 to 255, or null; it has 300 items; shorten it to 255"
        ],
    ),
    (
        "broken rule",
        HEAD + "limits: {max_batch_size: 8, max_num_tokens: 4}\nserving: {http_port: 9, grpc_port: 9}\n",
        [
            "5: limits.max_num_tokens: found 4; a batch of 8 needs as many rows; raise it to 8 or more [limits-rows-batch]",
            "6: serving.grpc_port: found 9, which is http_port too; choose another port [serving-ports]",
        ],
    ),
]
