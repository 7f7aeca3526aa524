// Sections "envelope" and "batch": sealed messages, and several of them in one.
// A receiver opens a message for the kind and run that it expects, and often the signer.

import { equal, join } from './bytes.js'
import { decode, encode, isInteger } from './canonical.js'
import { context, derive } from './digest.js'
import { refuse } from './errors.js'
import { publicKey, sign, verifies } from './identity.js'
import { decodeRecord, encodeRecord, RECORD_OF_KIND, TYPES } from './schema.js'
import { DEPTH, ENVELOPE, GOSSIP, GROUP, ITEMS, MAJOR } from './spec.js'

const SEALED = { bytes: GROUP + ENVELOPE, items: ITEMS, depth: DEPTH }
const BATCH = { bytes: GOSSIP, items: ITEMS, depth: DEPTH }
const MOST_IN_BATCH = 512

/** The name of a message. */
export const messageId = (kind, run, signer, body) => derive(kind, run, signer, body)

/** The bytes that are signed. */
export const signedBytes = (kind, id) => join(context(kind), Uint8Array.of(0), id)

/** Whether `signature` is that of the message of this kind, run, signer and body. */
export function signatureHolds({ kind, run, signer, body, signature }) {
  return verifies(signer, signedBytes(kind, messageId(kind, run, signer, body)), signature)
}

/** Seal a record, as schema.js has it, with the private key `seed`. */
export function seal(kind, run, seed, record) {
  const body = encodeRecord(RECORD_OF_KIND.get(kind), record)
  const signer = publicKey(seed)
  const signature = sign(seed, signedBytes(kind, messageId(kind, run, signer, body)))
  return encode(TYPES.get('Parts').write({ major: MAJOR, kind, run, signer, body, signature }), SEALED)
}

/** The six parts of a sealed message, each in its bounds. Another major version is named before anything else. */
export function parts(sealed) {
  const value = decode(sealed, SEALED)
  if (Array.isArray(value) && isInteger(value[0]) && value[0] !== MAJOR) refuse('wrong-major', `version ${value[0]}`)
  return TYPES.get('Parts').read(value)
}

/** Open a sealed message of the kind and run, and of the signer where one is given: its parts, `id` and `record`. */
export function open(sealed, kind, run, signer = null) {
  const found = parts(sealed)
  if (found.kind !== kind) refuse('wrong-kind', `${found.kind}, not ${kind}`)
  if (!equal(found.run, run)) refuse('wrong-run', 'sealed in another run')
  if (signer !== null && !equal(found.signer, signer)) refuse('wrong-signer', 'sealed by another key')
  const record = decodeRecord(RECORD_OF_KIND.get(kind), found.body)
  if (!signatureHolds(found)) refuse('bad-signature', 'the signature does not verify')
  return { ...found, id: messageId(kind, run, found.signer, found.body), record }
}

/** Several sealed messages in one. */
export function packBatch(sealed) {
  const bytes = encode(sealed, BATCH)
  unpackBatch(bytes)
  return bytes
}

/** The sealed messages of a batch; each has six parts, and is for the caller to open. */
export function unpackBatch(bytes) {
  const value = decode(bytes, BATCH)
  if (!Array.isArray(value)) refuse('wrong-type', 'a batch is an array')
  if (value.length < 1 || value.length > MOST_IN_BATCH) refuse('out-of-range', `${value.length} messages`)
  for (const sealed of value) {
    if (!(sealed instanceof Uint8Array)) refuse('wrong-type', 'a message is bytes')
    parts(sealed)
  }
  return value
}
