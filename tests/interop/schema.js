// Sections "fields" and "wire": the types of the fields, read from the definitions in SPEC.md.
// Each type reads a wire value (see canonical.js) into a plain one, or refuses it, and writes it back: a record or row is an
// object with its fields, a float is a number; all else is as on the wire.

import { before, utf8 } from './bytes.js'
import { decode, encode, Float, isInteger } from './canonical.js'
import { refuse } from './errors.js'
import { checkKey } from './identity.js'
import { RULES } from './rules.js'
import { DEPTH, ITEMS, blocks, rows, sections } from './spec.js'

/** Every record and row by its name: `{name, kind, max, items, fields, read, write}`. */
export const TYPES = new Map()

/** The name of the record that is sealed under a kind. */
export const RECORD_OF_KIND = new Map()

/** The record of this name in canonical bytes, read and checked with all its rules. */
export function decodeRecord(name, bytes) {
  const { max, items } = record(name)
  const value = TYPES.get(name).read(decode(bytes, { bytes: max, items, depth: DEPTH }))
  RULES[name]?.(value)
  return value
}

/** The canonical bytes of a record; what a receiver would refuse is refused here. */
export function encodeRecord(name, value) {
  const { max, items, write } = record(name)
  const bytes = encode(write(value), { bytes: max, items, depth: DEPTH })
  decodeRecord(name, bytes)
  return bytes
}

function record(name) {
  const type = TYPES.get(name)
  if (type?.max === undefined) throw new Error(`no record ${name} with a max`)
  return type
}

const same = (value) => value

function wrongType(where, wanted) {
  refuse('wrong-type', `${where} is not ${wanted}`)
}

function inRange(where, size, least, most) {
  if (size < least || size > most) refuse('out-of-range', `${where}: ${size} is not in ${least}..${most}`)
}

function uint(least, most) {
  const read = (value, where) => {
    if (!isInteger(value)) wrongType(where, 'an integer')
    inRange(where, value, least, most)
    return value
  }
  return { read, write: same }
}

function float(least, most) {
  const read = (value, where) => {
    if (!(value instanceof Float)) wrongType(where, 'a float')
    inRange(where, value.number, least, most)
    return value.number
  }
  return { read, write: (number) => new Float(number) }
}

const bool = {
  read(value, where) {
    if (typeof value !== 'boolean') wrongType(where, 'a boolean')
    return value
  },
  write: same,
}

// What one line for people must not hold: control characters and those that change the direction or order of text.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/

function text(least, most) {
  const read = (value, where) => {
    if (typeof value !== 'string') wrongType(where, 'a string')
    inRange(where, utf8(value).length, least, most)
    if (CONTROLS.test(value)) refuse('out-of-range', `${where} holds a control character`)
    return value
  }
  return { read, write: same }
}

function match(pattern, most) {
  const whole = new RegExp(`^(?:${pattern})$`)
  const read = (value, where) => {
    if (typeof value !== 'string') wrongType(where, 'a string')
    inRange(where, utf8(value).length, 0, most)
    if (!whole.test(value)) refuse('out-of-range', `${where} does not match ${pattern}`)
    return value
  }
  return { read, write: same }
}

function oneOf(words) {
  const read = (value, where) => {
    if (typeof value !== 'string') wrongType(where, 'a string')
    if (!words.includes(value)) refuse('out-of-range', `${where} is none of ${words.join(', ')}`)
    return value
  }
  return { read, write: same }
}

function bytes(least, most, step = 1) {
  const read = (value, where) => {
    if (!(value instanceof Uint8Array)) wrongType(where, 'bytes')
    inRange(where, value.length, least, most)
    if (value.length % step !== 0) refuse('out-of-range', `${where}: ${value.length} is no multiple of ${step}`)
    return value
  }
  return { read, write: same }
}

const key = {
  read(value, where) {
    if (!(value instanceof Uint8Array)) wrongType(where, 'bytes')
    return checkKey(value)
  },
  write: same,
}

function map(most) {
  const read = (value, where) => {
    if (!(value instanceof Map)) wrongType(where, 'a map')
    inRange(where, encode(value, { items: Infinity }).length, 0, most)
    return value
  }
  return { read, write: same }
}

function list(item, least, most, ascending) {
  const read = (value, where) => {
    if (!Array.isArray(value)) wrongType(where, 'an array')
    inRange(where, value.length, least, most)
    const items = value.map((each, i) => item.read(each, `${where}[${i}]`))
    if (ascending && items.some((each, i) => i > 0 && !before(items[i - 1], each))) {
      refuse('inconsistent', `${where} is not ascending`)
    }
    return items
  }
  return { read, write: (items) => items.map(item.write) }
}

function optional(type) {
  return {
    read: (value, where) => (value === null ? null : type.read(value, where)),
    write: (value) => (value === null ? null : type.write(value)),
  }
}

function named(name) {
  return {
    read: (value, where) => TYPES.get(name).read(value, where),
    write: (value) => TYPES.get(name).write(value),
  }
}

function readRecord(name, fields, value, where) {
  if (!(value instanceof Map)) wrongType(where, `a record ${name}`)
  for (const field of value.keys()) if (!fields.has(field)) refuse('unknown-field', `${where}.${field}`)
  for (const field of fields.keys()) if (!value.has(field)) refuse('missing-field', `${where}.${field}`)
  return Object.fromEntries([...fields].map(([field, type]) => [field, type.read(value.get(field), `${where}.${field}`)]))
}

function readRow(name, fields, value, where) {
  if (!Array.isArray(value) || value.length !== fields.size) wrongType(where, `a row ${name}`)
  return Object.fromEntries([...fields].map(([field, type], i) => [field, type.read(value[i], `${where}.${field}`)]))
}

// The notation of types. What stands for a fixed pattern (slug, engine, …) is in the table of the section "fields".

const ALIASES = new Map(
  rows('fields')
    .map(([left, right]) => [/^`([a-z]+)`$/.exec(left)?.[1], /^`(match [^`]+)`/.exec(right)?.[1]])
    .filter(([alias, pattern]) => alias !== undefined && pattern !== undefined),
)

const NUMBER = String.raw`-?\d+(?:\.\d+)?`

const NOTATION = [
  [/^(.+?) ?\?$/, (type) => optional(parseType(type))],
  [RegExp(`^uint (${NUMBER})\\.\\.(${NUMBER})$`), (least, most) => uint(Number(least), Number(most))],
  [RegExp(`^float (${NUMBER})\\.\\.(${NUMBER})$`), (least, most) => float(Number(least), Number(most))],
  [/^bool$/, () => bool],
  [/^text (\d+)\.\.(\d+)$/, (least, most) => text(Number(least), Number(most))],
  [/^match \/(.+)\/ \.\.(\d+)$/, (pattern, most) => match(pattern, Number(most))],
  [/^("[^"]*"(?: \| "[^"]*")*)$/, (words) => oneOf(words.split(' | ').map((word) => word.slice(1, -1)))],
  [/^bytes (\d+)\.\.(\d+)(?: step (\d+))?$/, (least, most, step = 1) => bytes(Number(least), Number(most), Number(step))],
  [/^digest$/, () => bytes(32, 32)],
  [/^signature$/, () => bytes(64, 64)],
  [/^key$/, () => key],
  [/^map (\d+)$/, (most) => map(Number(most))],
  [/^\[(.+)\] (\d+)\.\.(\d+)( ascending)?$/, (item, least, most, ascending) =>
    list(parseType(item), Number(least), Number(most), ascending !== undefined)],
  [/^([A-Z][A-Za-z]*)$/, named],
]

function parseType(notation) {
  const meaning = ALIASES.get(notation) ?? notation
  for (const [pattern, make] of NOTATION) {
    const found = pattern.exec(meaning)
    if (found !== null) return make(...found.slice(1))
  }
  throw new Error(`SPEC.md has a type that is not in its notation: ${notation}`)
}

const HEADING = /^(record|row) (\w+)(?: kind ([a-z-]+))?(?: max (\d+))?(?: items (\d+))?$/

function define(definition) {
  const [heading, ...lines] = definition.trimEnd().split('\n')
  const found = HEADING.exec(heading)
  if (found === null) throw new Error(`SPEC.md has a definition that is none: ${heading}`)
  const [, form, name, kind, max, items] = found
  const fields = new Map(lines.map((line) => {
    const [, field, notation] = /^ {2}(\w+) +(.+)$/.exec(line)
    return [field, parseType(notation)]
  }))
  const type = form === 'row'
    ? {
        read: (value, where = name) => readRow(name, fields, value, where),
        write: (value) => [...fields].map(([field, each]) => each.write(value[field])),
      }
    : {
        read: (value, where = name) => readRecord(name, fields, value, where),
        write: (value) => new Map([...fields].map(([field, each]) => [field, each.write(value[field])])),
      }
  Object.assign(type, { name, kind, fields, max: max && Number(max), items: items ? Number(items) : ITEMS })
  TYPES.set(name, type)
  if (kind !== undefined) RECORD_OF_KIND.set(kind, name)
}

for (const title of sections.keys()) {
  for (const block of blocks(title)) {
    if (/^(record|row) /.test(block)) block.trim().split('\n\n').forEach(define)
  }
}
