// The menu marks the section in view; a link to something folded opens it.
"use strict";
{
  const links = [...document.querySelectorAll("nav a")];
  const sections = links.map(link => document.querySelector(link.hash));
  const mark = () => {
    const edge = window.innerHeight / 3;
    const place = sections.findLastIndex(section => section.getBoundingClientRect().top <= edge);
    links.forEach((link, i) => {
      const here = i === Math.max(place, 0);
      if (here && link.getAttribute("aria-current") !== "true") {
        link.setAttribute("aria-current", "true");
        link.parentElement.scrollTo({left: link.offsetLeft - 40});
      } else if (!here) link.removeAttribute("aria-current");
    });
  };
  addEventListener("scroll", mark, {passive: true});
  mark();
  const unfold = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const folded = target && target.querySelector(":scope > details");
    if (folded) { folded.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", unfold);
  unfold();
}
