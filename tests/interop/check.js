// `node check.js` checks every case of every file in protocol/vectors, and the worked examples in SPEC.md.
// A file, a list or a member of a case that it doesn't know, and a list without cases, is a failure.

import { readdirSync, readFileSync } from 'node:fs'
import { decode as decodeAny } from '@msgpack/msgpack'
import { fromHex, toHex } from './bytes.js'
import { decode, encode, Float, isInteger } from './canonical.js'
import { Follower } from './chain.js'
import { patternBytes, patterns, readBody, readDelta, writeBody } from './delta.js'
import { blob, derive, merkleRoot } from './digest.js'
import { open, packBatch, parts, seal, unpackBatch } from './envelope.js'
import { Refused } from './errors.js'
import { EXAMPLES, recordsWithMax } from './examples.js'
import { checkKey, keyOfPeerId, peerId, publicKey, sign, verifies } from './identity.js'
import { makeLink, readLink } from './link.js'
import { beaconOf, distance, draw, drawHolds, isDrawn, promptKey, slotKey, uniforms } from './sampling.js'
import { decodeRecord, encodeRecord, TYPES } from './schema.js'
import { bitsOf, packIds, packLogprobs, unpackIds, unpackLogprobs } from './tokens.js'
import { blobKey, roleKey, topic } from './topics.js'
import { readFloat, readValue } from './values.js'
import { readRaw } from './zstd.js'

const VECTORS = new URL('../../protocol/vectors/', import.meta.url)

const vectors = new Map(
  readdirSync(VECTORS)
    .filter((file) => file.endsWith('.json'))
    .sort()
    .map((file) => [file.slice(0, -'.json'.length), JSON.parse(readFileSync(new URL(file, VECTORS), 'utf8'))]),
)

let passed = 0
let failed = 0

function fail(file, name, what, expected, got) {
  failed += 1
  console.log(`FAILED ${file}: ${name}: ${what}\n  expected ${expected}\n  got      ${got}`)
}

/** Run one case: `check` tells `same(what, expected, got)` of each thing that it compares. */
function run(file, name, check) {
  let wrong = null
  const same = (what, expected, got) => {
    if (wrong === null && !Object.is(expected, got)) wrong = [what, expected, got]
  }
  try {
    check(same)
  } catch (error) {
    wrong = ['it is refused', 'no error', error instanceof Refused ? error.message : error.stack]
  }
  if (wrong === null) passed += 1
  else fail(file, name, ...wrong)
}

/** The reason for which `act` is refused, or a sentence that says that it wasn't. */
function reasonOf(act) {
  try {
    act()
  } catch (error) {
    if (error instanceof Refused) return error.reason
    throw error
  }
  return 'it was accepted'
}

/** A wire value as text that tells integers from floats; `plain` doesn't, as other msgpack libraries don't. */
function show(value, plain = false) {
  if (value === null || typeof value === 'boolean' || typeof value === 'string') return JSON.stringify(value)
  if (value instanceof Float) return plain ? `${value.number}` : `float ${value.number}`
  if (isInteger(value) || typeof value === 'number') return `${value}`
  if (value instanceof Uint8Array) return `<${toHex(value)}>`
  if (Array.isArray(value)) return `[${value.map((item) => show(item, plain)).join(', ')}]`
  const pairs = value instanceof Map ? [...value] : Object.entries(value)
  return `{${pairs.map(([key, item]) => `${JSON.stringify(key)}: ${show(item, plain)}`).sort().join(', ')}}`
}

/** The value and its bytes are each other's form, and any msgpack library reads the bytes. */
function sameForm(same, json, bytes, limits) {
  const value = readValue(json)
  same('the value', show(value), show(decode(fromHex(bytes), limits)))
  same('the bytes', bytes, toHex(encode(value, limits)))
  same('the value by a library', show(value, true), show(decodeAny(fromHex(bytes), { useBigInt64: true }), true))
}

const seedOf = (key) => fromHex(vectors.get('identity').valid.find((each) => each.public === key).seed)

const floats = (list) => list.map(readFloat)

const hexes = (list) => list.map(fromHex)

const SEALED_AND_REFUSED = ['sealed kind run signer? error', (it, same) => {
  const signer = it.signer === undefined ? null : fromHex(it.signer)
  same('error', it.error, reasonOf(() => open(fromHex(it.sealed), it.kind, fromHex(it.run), signer)))
}]

/** For each file and each list in it: the members of its cases, and the check of a case. */
const CHECKS = {
  canonical: {
    valid: ['value bytes', ({ value, bytes }, same) => sameForm(same, value, bytes)],
    invalid: ['bytes error', ({ bytes, error }, same) => same('error', error, reasonOf(() => decode(fromHex(bytes))))],
  },

  digest: {
    derive: ['text input digest', (it, same) => same('digest', it.digest, toHex(derive(it.text, fromHex(it.input))))],
    blob: ['input digest', (it, same) => same('digest', it.digest, toHex(blob(fromHex(it.input))))],
    merkle: ['leaves root', (it, same) => same('root', it.root, toHex(merkleRoot(hexes(it.leaves))))],
  },

  identity: {
    valid: ['seed public peer_id message signature', (it, same) => {
      const [seed, key, message, signature] = hexes([it.seed, it.public, it.message, it.signature])
      same('public', it.public, toHex(publicKey(seed)))
      same('key', it.public, toHex(checkKey(key)))
      same('peer_id', it.peer_id, peerId(key))
      same('the key in it', it.public, toHex(keyOfPeerId(it.peer_id)))
      same('signature', it.signature, toHex(sign(seed, message)))
      same('it verifies', true, verifies(key, message, signature))
    }],
    bad_keys: ['key', ({ key }, same) => same('error', 'bad-key', reasonOf(() => checkKey(fromHex(key))))],
    bad_peer_ids: ['peer_id', (it, same) => same('error', 'bad-peer-id', reasonOf(() => keyOfPeerId(it.peer_id)))],
    bad_signatures: ['public message signature', (it, same) =>
      same('it verifies', false, verifies(fromHex(it.public), fromHex(it.message), fromHex(it.signature)))],
  },

  topics: {
    topics: ['run cargo topic', (it, same) => same('topic', it.topic, topic(fromHex(it.run), it.cargo))],
    roles: ['run role key', (it, same) => same('key', it.key, toHex(roleKey(fromHex(it.run), it.role)))],
    blobs: ['blob key', (it, same) => same('key', it.key, toHex(blobKey(fromHex(it.blob))))],
  },

  tokens: {
    ids: ['ids vocabulary bits packed', ({ ids, vocabulary, bits, packed }, same) => {
      same('bits', bits, bitsOf(vocabulary))
      same('packed', packed, toHex(packIds(ids, bits)))
      same('ids', show(ids), show(unpackIds(fromHex(packed), ids.length, bits)))
    }],
    logprobs: ['values packed read', ({ values, packed, read }, same) => {
      same('packed', packed, toHex(packLogprobs(floats(values))))
      const got = unpackLogprobs(fromHex(packed))
      same('how many', read.length, got.length)
      floats(read).forEach((number, i) => same(`read[${i}]`, number, got[i]))
    }],
  },

  sampling: {
    streams: ['run head sampler slot beacon slot_key prompt_key uniforms', (it, same) => {
      const beacon = beaconOf(fromHex(it.head))
      const key = slotKey(fromHex(it.run), beacon, fromHex(it.sampler), readValue(it.slot))
      same('beacon', it.beacon, toHex(beacon))
      same('slot_key', it.slot_key, toHex(key))
      same('prompt_key', it.prompt_key, toHex(promptKey(key)))
      for (const { completion, start, values } of it.uniforms) {
        const got = uniforms(key, completion, start, values.length)
        floats(values).forEach((number, i) => same(`u[${completion}, ${start + i}]`, number, got[i]))
      }
    }],
    draws: ['probabilities u token', (it, same) => same('token', it.token, draw(floats(it.probabilities), readFloat(it.u)))],
    replays: ['probabilities token u d z', (it, same) => {
      const got = distance(floats(it.probabilities), it.token, readFloat(it.u))
      for (const name of ['d', 'z']) {
        const expected = readFloat(it[name])
        const close = Math.abs(got[name] - expected) <= 1e-12 * Math.abs(expected)
        same(name, expected, close ? expected : got[name])
      }
    }],
    lots: ['draw rate drawn', (it, same) => same('drawn', it.drawn, isDrawn(fromHex(it.draw), readFloat(it.rate)))],
  },

  envelope: {
    valid: ['sealed kind run signer body id', (it, same) => {
      const [sealed, of, signer] = hexes([it.sealed, it.run, it.signer])
      for (const expected of [null, signer]) {
        const opened = open(sealed, it.kind, of, expected)
        same('signer', it.signer, toHex(opened.signer))
        same('body', it.body, toHex(opened.body))
        same('id', it.id, toHex(opened.id))
        same('sealed again', it.sealed, toHex(seal(it.kind, of, seedOf(it.signer), opened.record)))
        if (it.kind === 'verdict') {
          same('the draw verifies', true, drawHolds(signer, of, opened.record.group, opened.record.draw))
        }
      }
      same('the parts', it.sealed, toHex(encode(TYPES.get('Parts').write(parts(sealed)))))
    }],
    invalid: SEALED_AND_REFUSED,
  },

  major1: {
    invalid: SEALED_AND_REFUSED,
  },

  batch: {
    valid: ['bytes sealed', ({ bytes, sealed }, same) => {
      same('sealed', sealed.join(), unpackBatch(fromHex(bytes)).map(toHex).join())
      same('bytes', bytes, toHex(packBatch(hexes(sealed))))
    }],
    invalid: ['bytes error', ({ bytes, error }, same) => same('error', error, reasonOf(() => unpackBatch(fromHex(bytes))))],
  },

  link: {
    valid: ['link value', ({ link, value }, same) => {
      const record = readLink(link)
      same('value', show(readValue(value)), show(TYPES.get('Link').write(record)))
      same('link', link.trim(), makeLink(record))
    }],
    invalid: ['link error', ({ link, error }, same) => same('error', error, reasonOf(() => readLink(link)))],
  },

  messages: {
    valid: ['record value bytes', ({ record, value, bytes }, same) => {
      const { max, items } = TYPES.get(record)
      sameForm(same, value, bytes, { bytes: max, items })
      same('the record', bytes, toHex(encodeRecord(record, decodeRecord(record, fromHex(bytes)))))
    }],
    invalid: ['record bytes error', ({ record, bytes, error }, same) =>
      same('error', error, reasonOf(() => decodeRecord(record, fromHex(bytes))))],
  },

  zstd: {
    valid: ['size frame chunk', ({ size, frame, chunk }, same) => same('chunk', chunk, toHex(readRaw(fromHex(frame), size)))],
    invalid: ['size frame error', ({ size, frame, error }, same) => same('error', error, reasonOf(() => readRaw(fromHex(frame), size)))],
  },

  delta: {
    valid: ['base frame body positions values', ({ frame, body, positions, ...it }, same) => {
      const base = patterns(fromHex(it.base))
      for (const read of [readDelta(fromHex(frame), base), readBody(fromHex(body), base)]) {
        same('positions', show(positions), show(read.positions))
        same('values', it.values, toHex(patternBytes(read.values)))
      }
      same('body', body, toHex(writeBody({ positions, values: patterns(fromHex(it.values)) }, base)))
    }],
    invalid: ['base frame error', ({ base, frame, error }, same) =>
      same('error', error, reasonOf(() => readDelta(fromHex(frame), patterns(fromHex(base)))))],
  },

  chain: { scenarios: ['manifest link? events'] }, // checked event by event, below
}

/** One step of a scenario of the chain. */
function checkEvent(follower, event, same) {
  let rule = null
  try {
    if (event.head !== undefined) follower.hearHead(fromHex(event.head))
    else if (event.proof !== undefined) follower.hearProof(...hexes(event.proof))
    else follower.hearGrant(fromHex(event.grant), hexes(event.branch))
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    rule = error.rule ?? error.reason
  }
  same('rule', event.rule, rule)
  same('term', event.term, follower.term)
  same('tip', event.tip, follower.tip && toHex(follower.tip.id))
  same('holding', event.holding, follower.holding)
  same('revoked', event.revoked.join(), [...follower.revoked].sort().join())
}

const AFTERWARDS = 'rule term tip holding revoked'

function membersOfEvent(event) {
  if (event.head !== undefined) return `head ${AFTERWARDS}`
  return event.proof !== undefined ? `proof ${AFTERWARDS}` : `grant branch ${AFTERWARDS}`
}

/** Whether a case has exactly the members that are known; `x?` may lack. */
function checkMembers(file, name, it, known) {
  const words = known.split(' ')
  const all = words.map((word) => word.replace('?', ''))
  const got = Object.keys(it).filter((member) => member !== 'name')
  const fits = got.every((member) => all.includes(member)) && words.every((word) => word.endsWith('?') || got.includes(word))
  if (!fits) fail(file, name, 'its members', known, got.join(' '))
}

function checkScenario(file, scenario) {
  let follower
  try {
    follower = new Follower(fromHex(scenario.manifest), scenario.link === undefined ? null : readLink(scenario.link))
  } catch (error) {
    fail(file, scenario.name, 'its manifest and link', 'no error', error.message)
    return
  }
  if (scenario.events.length === 0) fail(file, scenario.name, 'its events', 'at least one', 'none')
  scenario.events.forEach((event, i) => {
    const name = `${scenario.name}, event ${i}`
    checkMembers(file, name, event, membersOfEvent(event))
    run(file, name, (same) => checkEvent(follower, event, same))
  })
}

/** Check all cases of a file. */
function checkFile(file, { about, ...lists }) {
  const known = CHECKS[file]
  if (known === undefined) {
    fail(file, 'the file', 'it is unknown', Object.keys(CHECKS).join(', '), file)
    return
  }
  for (const list of new Set([...Object.keys(known), ...Object.keys(lists)])) {
    if (known[list] === undefined) fail(file, list, 'it is unknown', Object.keys(known).join(', '), list)
    else if (!(lists[list]?.length > 0)) fail(file, list, 'its cases', 'at least one', 'none')
    else {
      const [members, check] = known[list]
      for (const it of lists[list]) {
        checkMembers(file, it.name, it, members)
        if (list === 'scenarios') checkScenario(file, it)
        else run(file, `${list}: ${it.name}`, (same) => check(it, same))
      }
    }
  }
}

/** Run `act`, then print how many cases it had. */
function counted(title, act) {
  const before = passed + failed
  act()
  console.log(`${title.padEnd(24)} ${passed + failed - before} cases`)
}

for (const file of Object.keys(CHECKS)) {
  if (!vectors.has(file)) fail(file, 'the file', 'it is missing', `${file}.json`, 'nothing')
}
for (const [file, content] of vectors) counted(`${file}.json`, () => checkFile(file, content))

counted('records with a max', () => {
  for (const record of recordsWithMax) {
    run('messages', record, (same) => {
      for (const list of ['valid', 'invalid']) same(list, true, vectors.get('messages')[list].some((it) => it.record === record))
    })
  }
})

counted('examples in SPEC.md', () => {
  for (const [section, example] of Object.entries(EXAMPLES)) {
    try {
      for (const [name, [expected, got]] of Object.entries(example())) {
        run('SPEC.md', `${section}: ${name}`, (same) => same('example', expected, got))
      }
    } catch (error) {
      fail('SPEC.md', section, 'its example', 'no error', error.message)
    }
  }
})

console.log(`${passed} passed, ${failed} failed`)
process.exitCode = failed > 0 ? 1 : 0
