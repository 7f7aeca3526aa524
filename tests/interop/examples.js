// The worked examples in the text of SPEC.md: each function takes the text of its section and returns pairs of what the
// document says and what this implementation makes of it.

import { ED25519_TORSION_SUBGROUP, ed25519 } from '@noble/curves/ed25519.js'
import { fromHex, toHex } from './bytes.js'
import { decode, encode } from './canonical.js'
import { patterns, readDelta, writeBody } from './delta.js'
import { derive, merkleRoot } from './digest.js'
import { messageId, open, seal, signedBytes } from './envelope.js'
import { publicKey, SMALL_ORDER } from './identity.js'
import { beaconOf, promptKey, slotKey, uniforms } from './sampling.js'
import { decodeRecord, TYPES } from './schema.js'
import { rows, sections } from './spec.js'
import { bitsOf, packIds, packLogprobs, unpackIds } from './tokens.js'
import * as topics from './topics.js'

const P = ed25519.Point.Fp.ORDER

/** The groups of the first match of `pattern` in a section; the sentence must stand there. */
function find(title, pattern) {
  const found = pattern.exec(sections.get(title))
  if (found === null) throw new Error(`SPEC.md, section ${title}, has no sentence ${pattern}`)
  return found.slice(1)
}

function canonical() {
  const [hex] = find('canonical', /Example: `\{"a": 1, "b": \[true, nil, "é"\]\}` is `([0-9a-f]+)`/)
  const value = new Map([['b', [true, null, 'é']], ['a', 1]])
  return { encoded: [hex, toHex(encode(value))], 'read again': [hex, toHex(encode(decode(fromHex(hex))))] }
}

function digest() {
  const [leaf, none] = find('digest', /`derive\("leaf", ""\)` is `([0-9a-f]+)`; the root of no leaves is `([0-9a-f]+)`/)
  return { 'an empty leaf': [leaf, toHex(derive('leaf'))], 'the root of no leaves': [none, toHex(merkleRoot([]))] }
}

function tokens() {
  const [ids] = find('tokens', /the ids 1, 2, 3, 151935 at a vocabulary of 151936 \(18 bits\) are `([0-9a-f]+)`/)
  const [logprobs] = find('tokens', /the log-probabilities −0\.5 and −70 are\s+`([0-9a-f]+)`/)
  const list = [1, 2, 3, 151935]
  return {
    bits: [18, bitsOf(151936)],
    ids: [ids, toHex(packIds(list, 18))],
    'ids read again': [list.join(), unpackIds(fromHex(ids), 4, 18).join()],
    'log-probabilities': [logprobs, toHex(packLogprobs([-0.5, -70]))],
  }
}

function delta() {
  const [chunk, full] = find('delta', /from the chunk `([0-9a-f]+)`, where element 1 steps down by one and element 6 becomes `([0-9a-f]+)`/)
  const [body, frame] = find('delta', /the body is\s+`([0-9a-f]+)`, and one frame of it is `([0-9a-f]+)`/)
  const base = patterns(fromHex(chunk))
  const change = { positions: [1, 6], values: [base[1] - 1, ...patterns(fromHex(full))] }
  const read = readDelta(fromHex(frame), base)
  return {
    body: [body, toHex(writeBody(change, base))],
    positions: [change.positions.join(), read.positions.join()],
    values: [change.values.join(), read.values.join()],
  }
}

/** The private key, run, and the bytes of the worked example of the section "envelope". */
function envelopeExample() {
  const [seed, run] = find('envelope', /private key `([0-9a-f]+)` in the run `([0-9a-f]+)`/)
  const bytesBelow = (line) => find('envelope', RegExp(`^${line}.*\\n((?: {2}[0-9a-f]+\\n)+)`, 'm'))[0].replaceAll(/\s/g, '')
  const said = ['body', 'id', 'signed bytes', 'sealed'].map(bytesBelow)
  return { seed: fromHex(seed), run: fromHex(run), said }
}

function envelope() {
  const { seed, run, said: [bodyHex, idHex, signedHex, sealedHex] } = envelopeExample()
  const body = fromHex(bodyHex)
  const { head, ...join } = decodeRecord('Join', body)
  const id = messageId('join', run, publicKey(seed), body)
  const sealed = seal('join', run, seed, { ...join, head })
  const text = find('envelope', /the join `\{agent: "(.*?)", engine: "(.*?)", ext: \{\}, head: ([0-9a-f]+)…, name: "(.*?)"\}`/)
  return {
    record: [text.join(), [join.agent, join.engine, toHex(head).slice(0, 8), join.name].join()],
    id: [idHex, toHex(id)],
    'signed bytes': [signedHex, toHex(signedBytes('join', id))],
    sealed: [sealedHex, toHex(sealed)],
    opened: [bodyHex, toHex(open(fromHex(sealedHex), 'join', run, publicKey(seed)).body)],
  }
}

function sampling() {
  const { seed, run } = envelopeExample()
  const [head] = find('sampling', /slot 0 of that sampler under the head `([0-9a-f]+)`/)
  const beacon = beaconOf(fromHex(head))
  const key = slotKey(run, beacon, publicKey(seed), 0)
  const said = (name) => find('sampling', RegExp(`^${name} +([0-9a-f]{64})$`, 'm'))[0]
  const number = (j, t) => Number(find('sampling', RegExp(`^u\\[${j}, ${t}\\] +(?:[a-z0-9.]+\\()?([0-9.e-]+)\\)?$`, 'm'))[0])
  const u = (j, t) => [number(j, t), uniforms(key, j, t, 1)[0]]
  return {
    beacon: [said('beacon'), toHex(beacon)],
    slot_key: [said('slot_key'), toHex(key)],
    prompt_key: [said('prompt_key'), toHex(promptKey(key))],
    'u[0, 0]': u(0, 0),
    'u[0, 1]': u(0, 1),
    'u[7, 0]': u(7, 0),
  }
}

/** The y of small order that the document lists, those of identity.js, and those of the library's points. */
function identity() {
  const [text] = find('identity', /The y of points of small order are ([^.]+)\./)
  const said = text.replace('p − 1', `${P - 1n}`).match(/\d+/g).map(BigInt)
  const sorted = (numbers) => [...new Set(numbers)].map(String).sort().join()
  const points = ED25519_TORSION_SUBGROUP.map((hex) => ed25519.Point.fromHex(hex).y)
  return { 'small order': [sorted(said), sorted(SMALL_ORDER)], 'small order on the curve': [sorted(said), sorted(points)] }
}

function names() {
  const said = new Map(rows('topics'))
  const quoted = (what) => [...said.get(what).matchAll(/`([^`]+)`/g)].map((match) => match[1])
  const choices = (word) => {
    const [list] = find('topics', RegExp(`${word} is ((?:\`[a-z]+\`(?:, | or )?)+)`))
    return list.replaceAll('`', '').split(/, | or /).join()
  }
  return {
    cargoes: [choices('CARGO'), topics.CARGOES.join()],
    roles: [choices('ROLE'), topics.ROLES.join()],
    streams: [quoted('streams').join(), topics.STREAMS.join()],
    DHT: [quoted('DHT protocol').join(), topics.DHT],
  }
}

/** Names of the records that can be sent or fetched: those that have a `max`. */
export const recordsWithMax = [...TYPES.values()].filter((type) => type.max !== undefined).map((type) => type.name)

export const EXAMPLES = { canonical, digest, identity, tokens, delta, envelope, sampling, topics: names }
