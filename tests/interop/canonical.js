// Section "canonical": msgpack, in exactly one form per value, with limits that are checked before anything is allocated.
// nil, booleans, strings, arrays are themselves; bytes are Uint8Array, maps are Map, floats are Float (so that 1.0 is not 1),
// integers are numbers, and BigInt beyond ±(2^53 − 1).

import { compare, utf8 } from './bytes.js'
import { refuse } from './errors.js'
import { DEPTH, GROUP, ITEMS, KEY } from './spec.js'

/** A float64 on the wire. */
export class Float {
  constructor(number) {
    this.number = number
  }
}

export const LIMITS = { bytes: GROUP, items: ITEMS, depth: DEPTH }

export const isInteger = (value) => Number.isSafeInteger(value) || typeof value === 'bigint'

/** An integer as this module writes it: a number where it is exact, else a BigInt. */
export function integer(big) {
  const number = Number(big)
  return Number.isSafeInteger(number) ? number : BigInt(big)
}

// The forms of an integer of more than one byte: the type byte, the width in bytes, and whether it is signed.
const UNSIGNED = [[0xcc, 1], [0xcd, 2], [0xce, 4], [0xcf, 8]]
const SIGNED = [[0xd0, 1], [0xd1, 2], [0xd2, 4], [0xd3, 8]]

// The headers of what has a length: the type byte and width of the length field, the shortest first; before them the
// short form within the type byte, where there is one.
const HEADERS = {
  text: { short: 0xa0, most: 31, long: [[0xd9, 1], [0xda, 2], [0xdb, 4]] },
  bytes: { short: null, most: -1, long: [[0xc4, 1], [0xc5, 2], [0xc6, 4]] },
  array: { short: 0x90, most: 15, long: [[0xdc, 2], [0xdd, 4]] },
  map: { short: 0x80, most: 15, long: [[0xde, 2], [0xdf, 4]] },
}

const bound = (width) => 1n << BigInt(8 * width)

/** Decode `bytes`, all of them, into one value; refuse every form but the canonical one. */
export function decode(bytes, { bytes: most = GROUP, items = ITEMS, depth = DEPTH } = LIMITS) {
  if (bytes.length > most) refuse('too-large', `${bytes.length} bytes, at most ${most}`)
  const reader = new Reader(bytes, items, depth)
  const value = reader.value(0)
  if (reader.at < bytes.length) refuse('trailing-bytes', `${bytes.length - reader.at} bytes follow the value`)
  return value
}

class Reader {
  constructor(bytes, items, depth) {
    this.bytes = bytes
    this.at = 0
    this.itemsLeft = items
    this.depth = depth
  }

  take(length) {
    if (length > this.bytes.length - this.at) refuse('truncated', `the bytes end within a value, at ${this.at}`)
    this.at += length
    return this.bytes.subarray(this.at - length, this.at)
  }

  unsigned(width) {
    return this.take(width).reduce((sum, byte) => (sum << 8n) | BigInt(byte), 0n)
  }

  value(outer) {
    const [type] = this.take(1)
    if (type <= 0x7f) return type
    if (type >= 0xe0) return type - 0x100
    if (type === 0xc0) return null
    if (type === 0xc2) return false
    if (type === 0xc3) return true
    if (type === 0xcb) return this.float()
    const text = this.length(type, HEADERS.text)
    if (text !== null) return this.text(text)
    const bytes = this.length(type, HEADERS.bytes)
    if (bytes !== null) return this.take(bytes).slice()
    const array = this.length(type, HEADERS.array)
    if (array !== null) return this.array(array, outer + 1)
    const map = this.length(type, HEADERS.map)
    if (map !== null) return this.map(map, outer + 1)
    return this.integer(type)
  }

  /** The length in a header of this kind, or null if `type` begins another kind of value. */
  length(type, { short, most, long }) {
    if (short !== null && type >= short && type <= short + most) return type - short
    const form = long.findIndex(([byte]) => byte === type)
    if (form < 0) return null
    const length = Number(this.unsigned(long[form][1]))
    const shorter = form > 0 ? Number(bound(long[form - 1][1])) - 1 : most
    if (length <= shorter) refuse('not-canonical', `a length of ${length} has a shorter header`)
    return length
  }

  integer(type) {
    const unsigned = UNSIGNED.findIndex(([byte]) => byte === type)
    if (unsigned >= 0) {
      const number = this.unsigned(UNSIGNED[unsigned][1])
      const shorter = unsigned > 0 ? bound(UNSIGNED[unsigned - 1][1]) : 0x80n
      if (number < shorter) refuse('not-canonical', `${number} has a shorter form`)
      return integer(number)
    }
    const signed = SIGNED.findIndex(([byte]) => byte === type)
    if (signed >= 0) {
      const width = SIGNED[signed][1]
      const number = BigInt.asIntN(8 * width, this.unsigned(width))
      const shorter = signed > 0 ? -bound(SIGNED[signed - 1][1]) / 2n : -0x20n
      if (number >= shorter) refuse('not-canonical', `${number} has a shorter form`)
      return integer(number)
    }
    return refuse('forbidden-type', `the type byte ${type.toString(16)}`)
  }

  float() {
    const bytes = this.take(8)
    const number = new DataView(bytes.buffer, bytes.byteOffset, 8).getFloat64(0)
    return new Float(checkedFloat(number))
  }

  text(length) {
    const bytes = this.take(length)
    try {
      return new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes)
    } catch {
      return refuse('bad-text', 'a string that is not UTF-8')
    }
  }

  enter(items, depth) {
    if (depth > this.depth) refuse('too-large', `nested deeper than ${this.depth}`)
    if (items > this.itemsLeft) refuse('too-large', 'too many items')
    this.itemsLeft -= items
  }

  array(length, depth) {
    this.enter(length, depth)
    const out = []
    for (let i = 0; i < length; i++) out.push(this.value(depth))
    return out
  }

  map(length, depth) {
    this.enter(2 * length, depth)
    const out = new Map()
    let last = null
    for (let i = 0; i < length; i++) {
      const [type] = this.take(1)
      const size = this.length(type, HEADERS.text)
      if (size === null) refuse('forbidden-type', 'a map key that is not a string')
      if (size > KEY) refuse('too-large', `a key of ${size} bytes`)
      const key = this.text(size)
      const bytes = this.bytes.subarray(this.at - size, this.at)
      if (last !== null && compare(last, bytes) >= 0) refuse('not-canonical', `the key ${key} is out of order`)
      last = bytes
      out.set(key, this.value(depth))
    }
    return out
  }
}

function checkedFloat(number) {
  if (!Number.isFinite(number)) refuse('not-finite', `${number}`)
  if (Object.is(number, -0)) refuse('not-canonical', 'minus zero')
  return number
}

/** The canonical form of a value; a value that has none, or breaks a limit, is refused as in decoding. */
export function encode(value, { bytes: most = GROUP, items = ITEMS, depth = DEPTH } = LIMITS) {
  const writer = new Writer(items, depth)
  writer.value(value, 0)
  const out = new Uint8Array(Buffer.concat(writer.parts))
  if (out.length > most) refuse('too-large', `${out.length} bytes, at most ${most}`)
  return out
}

class Writer {
  constructor(items, depth) {
    this.parts = []
    this.itemsLeft = items
    this.depth = depth
  }

  value(value, outer) {
    if (value === null) this.parts.push(Uint8Array.of(0xc0))
    else if (typeof value === 'boolean') this.parts.push(Uint8Array.of(value ? 0xc3 : 0xc2))
    else if (isInteger(value)) this.integer(BigInt(value))
    else if (value instanceof Float) this.float(value.number)
    else if (typeof value === 'string') this.text(value)
    else if (value instanceof Uint8Array) {
      this.header(value.length, HEADERS.bytes)
      this.parts.push(value)
    } else if (Array.isArray(value)) {
      this.enter(value.length, outer + 1)
      this.header(value.length, HEADERS.array)
      for (const item of value) this.value(item, outer + 1)
    } else if (value instanceof Map) this.map(value, outer + 1)
    else refuse('forbidden-type', `${typeof value} has no form on the wire`)
  }

  number(type, number, width) {
    const out = new Uint8Array(1 + width)
    out[0] = type
    for (let i = width; i > 0; i--, number >>= 8n) out[i] = Number(number & 0xffn)
    this.parts.push(out)
  }

  integer(number) {
    if (number >= -0x20n && number < 0x80n) {
      this.parts.push(Uint8Array.of(Number(number & 0xffn)))
      return
    }
    const form = number < 0n
      ? SIGNED.find(([, width]) => number >= -bound(width) / 2n)
      : UNSIGNED.find(([, width]) => number < bound(width))
    if (form === undefined) refuse('out-of-range', `${number} takes more than 64 bits`)
    this.number(form[0], number, form[1])
  }

  float(number) {
    const out = new Uint8Array(9)
    out[0] = 0xcb
    new DataView(out.buffer).setFloat64(1, checkedFloat(number))
    this.parts.push(out)
  }

  header(length, { short, most, long }) {
    if (length <= most) {
      this.parts.push(Uint8Array.of(short + length))
      return
    }
    const [type, width] = long.find(([, size]) => length < bound(size))
    this.number(type, BigInt(length), width)
  }

  text(text) {
    if (!text.isWellFormed()) refuse('bad-text', 'half a surrogate pair')
    const bytes = utf8(text)
    this.header(bytes.length, HEADERS.text)
    this.parts.push(bytes)
  }

  enter(items, depth) {
    if (depth > this.depth) refuse('too-large', `nested deeper than ${this.depth}`)
    if (items > this.itemsLeft) refuse('too-large', 'too many items')
    this.itemsLeft -= items
  }

  map(map, depth) {
    this.enter(2 * map.size, depth)
    this.header(map.size, HEADERS.map)
    for (const key of map.keys()) {
      if (typeof key !== 'string') refuse('forbidden-type', 'a map key that is not a string')
      if (utf8(key).length > KEY) refuse('too-large', `a key of more than ${KEY} bytes`)
    }
    const pairs = [...map].sort(([a], [b]) => compare(utf8(a), utf8(b)))
    for (const [key, value] of pairs) {
      this.text(key)
      this.value(value, depth)
    }
  }
}
