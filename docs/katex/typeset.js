// Equations of every page, also of those that material loads without a reload.
document$.subscribe(({ body }) => renderMathInElement(body, {
  delimiters: [{ left: "\\[", right: "\\]", display: true }, { left: "\\(", right: "\\)", display: false }],
}));
