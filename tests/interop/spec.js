// SPEC.md as data: its sections, their code blocks, and the table of limits.
// The definitions of types are read from the document itself, so they can't differ from it.

import { readFileSync } from 'node:fs'

const text = readFileSync(new URL('../../SPEC.md', import.meta.url), 'utf8')

/** The text of each section by its title. */
export const sections = new Map(
  text.split(/^## /m).slice(1).map((part) => {
    const end = part.indexOf('\n')
    return [part.slice(0, end).trim(), part.slice(end + 1)]
  }),
)

/** The code blocks of a section. */
export function blocks(title) {
  return [...sections.get(title).matchAll(/^```\n(.*?)^```$/gms)].map((match) => match[1])
}

/** The rows of the tables of a section, each a list of its cells. */
export function rows(title) {
  return [...sections.get(title).matchAll(/^\|(.*)\|$/gm)]
    .map((match) => match[1].split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll('\\|', '|')))
}

const named = new Map(rows('limits').map(([name, value]) => [name, Number(value)]))

function limit(name) {
  const value = named.get(name)
  if (!Number.isSafeInteger(value)) throw new Error(`SPEC.md states no limit ${name}`)
  return value
}

export const MAJOR = limit('MAJOR')
export const DEPTH = limit('DEPTH')
export const ITEMS = limit('ITEMS')
export const KEY = limit('KEY')
export const SAFE = limit('SAFE')
export const GOSSIP = limit('GOSSIP')
export const GROUP = limit('GROUP')
export const ENVELOPE = limit('ENVELOPE')
