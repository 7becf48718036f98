// Elements of the pages. Text becomes text, never markup.
export const $ = (id) => document.getElementById(id);

/** A new element. `content`: texts and elements; false ones are left out. */
export function make(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content.filter(Boolean));
  return made;
}
