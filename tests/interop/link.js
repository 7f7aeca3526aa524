// Section "link": the text by which a newcomer finds a run, with a check against damage.
// Whatever is wrong with it, the reason is `bad-link`.

import { equal, join } from './bytes.js'
import { derive } from './digest.js'
import { refuse } from './errors.js'
import { decodeRecord, encodeRecord } from './schema.js'

const SCHEME = 'echo:'
const MOST = 4096
const CHECK = 4

const check = (bytes) => derive('link', bytes).subarray(0, CHECK)

export function makeLink(record) {
  const bytes = encodeRecord('Link', record)
  return SCHEME + Buffer.from(join(bytes, check(bytes))).toString('base64url')
}

export function readLink(text) {
  const link = text.trim()
  if (link.length > MOST || !link.startsWith(SCHEME)) refuse('bad-link', 'no link')
  const letters = link.slice(SCHEME.length)
  const all = new Uint8Array(Buffer.from(letters, 'base64url'))
  // The library reads more than the one form; what it would not write itself is refused.
  if (Buffer.from(all).toString('base64url') !== letters) refuse('bad-link', 'not base64url')
  if (all.length <= CHECK) refuse('bad-link', 'too short')
  const bytes = all.slice(0, -CHECK)
  if (!equal(check(bytes), all.subarray(-CHECK))) refuse('bad-link', 'a damaged link')
  try {
    return decodeRecord('Link', bytes)
  } catch (error) {
    return refuse('bad-link', error.message)
  }
}
